"""What a tensor is between two steps, and how it is summed.

``layout`` has Topology and the layouts, ``transfers`` the bytes that lead from one layout to another, ``reduction`` the
sums, on the CPU and (``cuda_sums``) on a GPU.

May import: ``compressors.kernels`` and what is below ``collectives``. Nothing here sends anything.
"""
