"""Compiles routes, and runs them.

- ``program``: compiles a route for one rank.
- ``executor``: runs a program.
- ``job``: what one run is given besides the tensor.
- ``segment_run``: runs one segment.
- ``bucket_layout``, ``bucket_stages``, ``bucket_program``: place the payloads of a payload bucket, and run the bucket.
- ``residuals``, ``store_keys``: the arithmetic of error feedback, and the keys of the state.
- ``progress``, ``lanes``, ``route_operations``: decide which segment is resumed next.
- ``halves``: the two halves of a route.
- ``calls``, ``by_nodes``, ``to_root``, ``copies``: collectives that users call, and copies of compressed data.
- ``ranges``: finds values that a sum cannot hold.
- ``traces``: gathers the traces of all ranks.
- ``tables``: runs segments and payload buckets as compiled tables of operations.
- ``ops``: one module for each collective.
- ``messages``: transfers bytes between ranks.
- ``data``: describes and sums tensors between two steps.

May import: ``planner`` (costs, for the order of lanes), ``compressors`` and the layers below them. No module here knows
a session. To add a collective, see ``ops``.
"""
