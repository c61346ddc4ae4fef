"""The compiled executor: the steps of a segment or of a payload bucket as a table of operations.

``operations`` describes a table, ``building`` makes it from the steps of a program, ``interpreter`` is the function
without the GIL that runs it, ``mpi_calls`` has the addresses of the MPI functions that it calls, and ``running`` makes
progress with it. It imports what a segment needs, and nothing of the programs that use it. A new kind of operation gets
a code and a text in ``operations``, a branch in ``interpreter``, and a method in ``building``.
"""
