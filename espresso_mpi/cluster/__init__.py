"""Nodes and jobs, from outside: what this node is, how ranks are started, and a cluster that is emulated on it.

``environment`` says what this node is; ``launch`` starts jobs under mpirun, the one place for its variables and
options; ``launched`` tells what started this process; ``lab`` and ``lab_nodes`` emulate a cluster.

May import: ``errors``. ``lab``, ``lab_nodes`` and ``launch`` work without numpy, numba and MPI, and so must what is
added to them. A variable or an option for MPI goes into ``launch`` and nowhere else.
"""
