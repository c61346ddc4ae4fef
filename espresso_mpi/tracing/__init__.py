"""Execution traces and statistics.

- ``recording``: the recorder and its spans.
- ``ledger``: sums up the times of tables of operations when somebody asks for them.
- ``stats``: the statistics of a session.
- ``trace_file``: the trace file for Perfetto.
- ``pictures``: draws a step.

May import: ``types``, ``files`` and ``errors``. ``collectives.traces`` gathers the traces of all ranks. To record
another kind of work, add it to ``recording.KINDS``, and open a span where the work is done.
"""
