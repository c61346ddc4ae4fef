"""What the benchmarks share.

``columns`` prints and writes the tables of all suites. Of collectives: ``checks`` makes the inputs and counts wrong
elements, ``turns`` times methods in turns, ``measuring`` does both and counts bytes, ``rows`` is what comes out. Of
training: ``replicas``. A suite says what takes part, and lists its columns.

May import: everything below ``bench``, and ``bench.reference``.
"""
