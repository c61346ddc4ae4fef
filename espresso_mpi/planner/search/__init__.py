"""The choice of a strategy for every tensor, and its certified bound.

- ``search``, ``found``, ``budget``: the search for one problem, its result, and the limit of what compression loses.
- ``backprop_search``, ``descent``, ``exploration``: the search in the order ``backprop``, and its compiled loops.
- ``schedule_search``, ``scheduling``, ``climb``, ``joining``: the search in the order ``schedule``.
- ``exchanges``, ``swaps``: improve a choice by changing one tensor, in the other orders.
- ``fused_search``, ``buffers``: the search that also forms buckets.
- ``many``: plans for thousands of tensors.
- ``noise``: leaves out compression whose gain the measurements cannot show.
- ``bound``, ``networks``, ``game``, ``relaxation``, ``fused_bound``: lower bounds of the step time.
- ``algorithms``, ``incremental``, ``confirmed``: Algorithms 1 and 2 of the paper.
- ``baselines``: plans of other systems.

May import: ``planner.model``. To add an algorithm, write a function from a ``Problem`` to a choice, and compare it in
``bench planner``.
"""
