"""Routes, compiled and run.

``program`` compiles a route for one rank, and ``executor`` runs it: each segment is a ``segment_run``, described by a
``job``. ``bucket_program`` runs several compressed tensors that share messages, whose payloads ``bucket_layout``
places. ``residuals`` is the arithmetic of error feedback, ``store_keys`` names what it keeps. ``progress``, ``lanes``
and ``route_operations`` decide which segment is resumed next. Below them: ``ops`` has one file for each collective,
``messages`` transfers bytes between ranks, ``data`` describes and sums tensors between two steps. ``ranges`` finds
values that sums cannot hold, ``traces`` gathers the traces of all ranks.

May import: ``planner`` (costs, for the order of lanes), ``compressors`` and what is below them. It knows no session. To
add a collective, see ``ops``.
"""
