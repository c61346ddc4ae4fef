"""What is kept from step to step: in memory, in states, in another unit.

``memory`` holds residuals, weights and counters by key; ``snapshots`` makes the state of a rank of it, ``loading`` goes
on from states, on other ranks by ``resharding``; ``folder`` writes and reads them as files; ``rescaling`` changes their
unit.

May import: ``options``, ``collectives`` and what is below them. A new kind of what is kept needs a name in ``memory``
and a rule in ``resharding`` for what becomes of it on other ranks.
"""
