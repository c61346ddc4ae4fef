"""Models and clusters that come with the library: workloads of well-known networks, the testbeds of the paper.

May import: ``planner.model``. To add a model, describe its layers (``language``, ``vision``) and its measured times
(``measured``), and name it in ``models.MODELS``; a cluster goes into ``clusters.TESTBEDS``.
"""
