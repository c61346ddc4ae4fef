"""CPU kernels, compiled by numba.

- ``host``, ``vectors``, ``group64``, ``entries``: the parts from which kernels are built.
- ``casts``: casts to 16-bit floats.
- ``blocks``, ``block_errors``: block quantisers, and bounds of their errors.
- ``dithering``, ``quantiser``, ``bit_planes``, ``packing``: stochastic levels, and codes of few bits.
- ``signs``: signs and votes.
- ``sparse``, ``sweeps``, ``samples``, ``magnitudes``, ``positions``, ``kept_entries``: the elements of largest
  magnitude, and their positions.
- ``linear_sparse``, ``chunk_choice``, ``topk_chunked``, ``chunked_entries``, ``clipping``: other sparsifiers.
- ``dct``: the cosine transform.
- ``deltas``: differences of neighbours, for ``bound``.
- ``count_sketch``, ``sketch_entries``: sketches.
- ``lowrank``, ``lowrank_entries``, ``matrices``, ``matrix_products``, ``orthonormal``: low rank.
- ``rotations``, ``hadamard``, ``flips``, ``codebooks``: rotations.

May import: ``compressors.base``, ``checks``, ``context``, ``schedule``. To add a kernel, decorate a loop with
``host.Kernel``, and the functions that it calls with ``host.inline``.
"""
