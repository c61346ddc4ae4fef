"""CPU kernels, compiled by numba: ``host`` has the blocks to build with, ``vectors`` and ``group64``
those of intrinsics; the others are one family or method each, or what several of them do.

May import: ``compressors.base``, ``checks``, ``context``, ``schedule``. To add one, decorate a loop with
``host.Kernel``; what it calls is ``host.inline``.
"""
