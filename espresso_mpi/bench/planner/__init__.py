"""The planner's benchmark: the tables of the paper, distances to certified bounds, times of selection.

``suite`` runs the parts, ``rows`` and ``tables`` are their results.

May import: the planner, and ``bench``.
"""
