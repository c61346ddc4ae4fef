"""The model: the time of a training step for given routes and compressors, F(S).

Measurements:

- ``profile``, ``profile_json``, ``profile_keys``: the profile of a cluster, its file, and the keys of its curves.
- ``curve``, ``fitting``: times as functions of sizes.
- ``workload``: the tensors of a training step.
- ``fingerprints``: what a plan depends on.

Costs of a step:

- ``tree``: every route.
- ``cost``: the operations of a route.
- ``dispatch``, ``timeline``, ``timetables``: the schedule of a step.
- ``beside``: ready times where communication takes cores from the backward pass.
- ``shared_messages``: the step of a session without a plan, whose tensors share messages.

The problem that a search solves:

- ``problem``: the options of all tensors.
- ``compiled_routes``, ``pricing``: routes as numbers, and the times of their operations.
- ``candidates``: the options of one tensor.
- ``dominance``, ``needs``: leave out options that are never better.
- ``fusion``: tensors that form buckets.

May import: ``compressors`` and the layers below it; nothing else of the planner. To add a cost, write it in ``cost``,
and measure it in ``autotune.profiler``.
"""
