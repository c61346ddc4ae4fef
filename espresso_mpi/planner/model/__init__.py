"""What a training step costs: every route, its operations, their times, and F(S), the time of a step.

``profile`` and ``trace`` are what was measured; ``tree`` has the routes, ``cost`` their operations, ``dispatch`` and
``timeline`` the schedule of a step, ``problem`` the choices of all tensors.

May import: ``compressors`` and what is below it; nothing else of the planner. A new cost goes into ``cost`` and is
measured by ``autotune.profiler``.
"""
