"""What ranks hold of a tensor between two steps, and the sums of it. No module here sends anything.

- ``layout``: the topology and the layouts.
- ``transfers``: the bytes that lead from one layout to the next.
- ``reduction``, ``cuda_sums``: sums on the CPU, and the same sums on a GPU.
- ``combining``: reductions by other operators than the sum.
- ``magnitudes``: searches for large values.

May import: ``compressors.kernels`` and the layers below ``collectives``. To add a sum, write it in ``reduction`` and in
``cuda_sums`` with the same bits.
"""
