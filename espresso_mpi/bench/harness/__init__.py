"""What the benchmarks of collectives share.

``checks`` makes the inputs and counts wrong elements, ``turns`` times methods in turns, ``measuring`` does both and
counts bytes, ``rows`` is what comes out, ``columns`` prints it. A suite says what takes part, and lists its columns.

May import: everything below ``bench``, and ``bench.reference``.
"""
