"""Classes that several methods share. A family chooses between its CPU and its GPU kernels.

- ``cast``: ``fp16`` and ``bf16``.
- ``quantised``: ``int8``, ``int4``, ``int2`` and the two ``fp8`` methods.
- ``dithered``: ``qsgd``, ``natural_dithering`` and ``terngrad``.
- ``signed``: the sign methods.
- ``low_rank``: ``powersgd`` and ``acpsgd``.

May import: ``compressors.kernels``, ``base``, ``checks``, ``context``, ``schedule``; not the methods. GPU kernels are
imported where they are called, since numba.cuda takes long to load. Add a family when a second method needs the code of
a first one.
"""
