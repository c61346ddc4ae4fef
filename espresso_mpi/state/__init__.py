"""What is kept from step to step: in memory, in checkpoints, in another unit.

``memory`` holds residuals, weights and counters by key; ``checkpoints`` makes states of it and loads them, also on
other ranks; ``rescaling`` changes its unit.

May import: ``options``, ``collectives`` and what is below them. A new kind of what is kept needs a name in ``memory``
and a rule in ``checkpoints`` for what becomes of it on other ranks.
"""
