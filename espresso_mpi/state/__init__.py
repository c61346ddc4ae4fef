"""The state that lasts from step to step, and checkpoints of it.

- ``store``: holds residuals, weights and counters by key.
- ``snapshots``: makes a state dict of them.
- ``loading``: continues from a state dict.
- ``resharding``: maps a state to other ranks.
- ``folder``: writes and reads states as files.
- ``rescaling``: changes the unit of residuals.

May import: ``options``, ``collectives`` and the layers below them. A new kind of state needs a name in ``store``, and a
rule in ``resharding`` for other ranks.
"""
