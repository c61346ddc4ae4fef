"""Choosing a strategy for every tensor: the paper's algorithms, other baselines, our search, and its certified bound.

``algorithms`` and ``baselines`` are the others'; ours is ``search``, of one problem, and ``fused_search``, of the
buffers (``buffers``) as well. In the order ``backprop`` it is ``backprop_search``, with the loops of ``descent`` and
``exploration``; in ``schedule`` it is ``schedule_search``, with ``scheduling``, ``climb`` and ``joining``; in the
others it ends with ``exchanges``. How far from the best a choice can be at most say ``bound`` (with ``networks`` and
``game``), ``fused_bound`` and ``relaxation``.

May import: ``planner.model``. To add an algorithm, write a function from a Problem to a choice, and compare it in
``bench planner``.
"""
