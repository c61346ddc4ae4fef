"""The collectives of routes. Every module of this folder is imported, and registers its collective.

- ``base``: the contract.
- ``allreduce``, ``reduce_scatter``, ``allgather``, ``alltoall``, ``reduce``, ``broadcast``, ``gather``: one collective
  each.

May import: ``collectives.messages`` and ``collectives.data``. To add a collective, write a module with a
``CollectiveOp`` under ``@register``, and add its name to ``types.Op``, so that routes can name it.
"""
