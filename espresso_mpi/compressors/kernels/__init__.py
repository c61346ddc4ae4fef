"""Kernels that methods share. Both folders write the same bytes.

- ``cpu``: kernels for host memory.
- ``cuda``: kernels for GPUs.

May import: ``compressors.base``, ``checks``, ``context`` and ``schedule``; never methods or families. A CPU kernel that
one method needs stands in the module of that method; its GPU kernel stands in ``cuda`` under the method's name.
"""
