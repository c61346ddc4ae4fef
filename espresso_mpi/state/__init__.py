"""The state that lasts from step to step, and checkpoints of it.

``store`` holds residuals, weights and counters by key. ``snapshots`` makes a state dict of them, ``loading`` continues
from state dicts, ``resharding`` maps them to other ranks. ``folder`` writes and reads them as files. ``rescaling``
changes their unit.

May import: ``options``, ``collectives`` and what is below them. A new kind of state needs a name in ``store``, and a
rule in ``resharding`` for other ranks.
"""
