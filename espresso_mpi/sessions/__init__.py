"""The parts of a ``Session``. Each class here is one group of its methods.

- ``base``: the base class: the engine, waits, and collective actions between calls.
- ``following``: follows a plan, and changes it.
- ``planning``: measures, records steps, and plans.
- ``checkpoints``: saves and loads checkpoints.
- ``advice``: one line about a compressor that does not go with the optimizer.
- ``handles``: what stands for a call that has not finished.
- ``calling``, ``collectives``, ``exchanges``, ``halves``, ``copies``: collectives as calls.
- ``repeated``, ``known_syncs``: calls that are made again with arrays like those before.
- ``memory``: memory that the ranks of a node share.
- ``missing``: gradients that some ranks do not have.

May import: ``autotune``, ``engine`` and the layers below them. To add a group of methods, write a class that derives
from ``base.SessionBase``.
"""
