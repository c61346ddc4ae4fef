"""Kernels that methods share: ``cpu`` for host memory, ``cuda`` for GPUs. Both write the same bytes.

May import: ``compressors.base``, ``checks``, ``context`` and ``schedule``; never methods or families. Kernels of one
method only stand in its own file, those for the GPU in ``cuda`` under its name.
"""
