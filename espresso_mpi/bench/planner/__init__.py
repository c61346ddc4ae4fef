"""``bench planner``: the tables of the paper, distances to certified bounds, and the time of decisions.

- ``suite``: runs the parts.
- ``setups``: the models, clusters and compressors for which plans are made.
- ``paper``, ``published``: our figures beside those of the paper.
- ``distance``: how far Algorithms 1 and 2 are from the upper bound, and why.
- ``cases``, ``random_cases``: small random problems whose optimum is known.
- ``time``: how long the planner takes.
- ``rows``, ``tables``: the results.

May import: ``espresso_mpi.planner``, and ``bench``. To add a part, write a function that yields rows, and call it in
``suite``.
"""
