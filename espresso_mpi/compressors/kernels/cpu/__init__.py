"""CPU kernels, compiled by numba: ``host`` has the blocks to build with, the others one family or method each.

May import: ``compressors.base``, ``context``, ``schedule``. To add one, decorate a loop with ``host.Kernel``; what it
calls is ``host.inline``.
"""
