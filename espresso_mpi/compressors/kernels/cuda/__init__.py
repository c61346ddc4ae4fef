"""GPU kernels: ``gpu`` has the blocks to build with, the others one family or method each.

Imported when the first GPU array appears, because numba.cuda takes long to load. Every module here is compiled by the
tests (``make test-ptx``) and compared with its CPU twin in a simulator.

May import: ``compressors.kernels.cpu`` for constants that both share, and what that may import. To add one, decorate a
kernel with ``gpu.kernel(signature)``.
"""
