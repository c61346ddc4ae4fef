"""Routes, compiled and run.

``program`` compiles a route for one rank, ``executor`` runs it, each segment as a ``journey`` that a ``job`` describes;
``residuals`` is the arithmetic of feedback, ``kept`` the keys of what it keeps; ``turns``, ``lanes`` and
``route_operations`` say what goes on next. Below them: ``ops``, one file for each collective; ``messages``, what
carries bytes between ranks; ``data``, what a tensor is between two steps, and how it is summed. ``ranges`` finds values
that sums cannot hold, ``traces`` gathers the traces of all ranks.

May import: ``planner`` (costs, for the order of lanes), ``compressors`` and what is below them. It knows no session. To
add a collective, see ``ops``.
"""
