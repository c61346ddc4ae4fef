"""Execution traces and statistics.

``recording`` has the recorder and its spans. ``trace_file`` is the file for Perfetto. ``stats`` are the statistics of a
session. ``pictures`` draws a step.

May import: ``types``, ``files`` and ``errors``. How ranks gather their traces is in ``collectives.traces``. To record
another kind of work, add it to ``recording.KINDS`` and open a span where it is done.
"""
