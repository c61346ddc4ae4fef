"""The choice of a plan while the training runs: ``plan="auto"``.

- ``tuner``: does everything in order: it watches steps, measures the cluster, tries plans and chooses one.
- ``first_steps``: decides whether the watched steps are compressed. It measures the network.
- ``clock``: separates the training steps.
- ``holding``: holds pushes back while steps are recorded.
- ``profiler``: measures the cluster. It calls the measurements of ``profiling``.
- ``profiling``: the parts of a profile.
- ``measuring_session``: opens sessions for measurements between two steps.
- ``synthetic_load``: computes beside a measurement, as training does.
- ``earlier_run``: follows the plan that an earlier run chose.
- ``next_run``: writes the plan for the next run.
- ``autoplan``: makes workloads and candidate plans.
- ``trials``: decides which plan each of the next steps follows.
- ``finalists``: the plans that go on in turns, and whether they can be told apart.
- ``payload_costs``: finds the plans that need no trial, by the bytes of their messages.
- ``tried``: the times of the plans that were tried.
- ``fidelity``: finds the compressors that change the moments of the optimizer too much.
- ``samples``: keeps samples of gradients for it.
- ``room``: finds out whether the GPUs have the memory for a trial.

May import: ``engine``, ``planner``, ``collectives`` and the layers below them. To add a setting, add a field to
``options.Tuning``. To add a measurement, see ``profiling``.
"""
