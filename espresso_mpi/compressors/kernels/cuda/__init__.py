"""GPU kernels. They are imported when the first GPU array appears, because numba.cuda takes long to load.

- ``gpu``: the parts from which kernels are built.
- ``launching``: launches them.
- ``casts``, ``blocks``, ``deltas``, ``dithering``, ``natural``: quantisers.
- ``signs``: signs and votes.
- ``sparse``, ``topk``, ``positions``, ``chunk_choice``, ``linear_sparse``, ``randomk``, ``topk_chunked``, ``dct``:
  sparsifiers.
- ``count_sketch``: sketches.
- ``lowrank``: low rank.
- ``rotations``, ``codebooks``, ``thc``: rotations.

May import: ``compressors.kernels.cpu`` for constants that both share, and what that may import. To add a kernel,
decorate it with ``gpu.kernel(signature)``. The tests compile every module (``make test-ptx``), and compare it with its
CPU kernel in a simulator.
"""
