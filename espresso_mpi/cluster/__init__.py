"""Nodes and jobs, seen from outside.

- ``environment``: describes this node.
- ``launch``: starts jobs under mpirun.
- ``launched``: finds out what started this process.
- ``lab``, ``lab_nodes``: emulate a cluster on this node.

May import: ``errors``. ``lab``, ``lab_nodes`` and ``launch`` work without numpy, numba and MPI. To add a variable or an
option for MPI, write it in ``launch`` and nowhere else.
"""
