"""Choosing a strategy for every tensor: the paper's algorithms, other baselines, our search, and its certified bound.

``algorithms`` and ``baselines`` are the others'; ``search`` with ``branches``, ``climb``, ``joining`` and
``scheduling`` is ours; ``bound`` and ``relaxation`` say how far from the best a choice can be at most.

May import: ``planner.model``. To add an algorithm, write a function from a Problem to a choice, and compare it in
``bench planner``.
"""
