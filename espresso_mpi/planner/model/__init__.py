"""What a training step costs: every route, its operations, their times, and F(S), the time of a step.

``profile`` and ``workload`` are what was measured: a profile of ``curve``, which ``fitting`` fits, and as JSON
(``profile_json``, ``profile_keys``). ``tree`` has the routes, ``cost`` their operations, ``dispatch`` and ``timeline``
the schedule of a step, ``problem`` the choices of all tensors. A problem is made in steps: ``compiled_routes`` are
routes in numbers, ``pricing`` says what their operations take, ``candidates`` are the options of a tensor,
``dominance`` leaves out those that are never better, ``fusion`` makes buffers of tensors.

May import: ``compressors`` and what is below it; nothing else of the planner. A new cost goes into ``cost`` and is
measured by ``autotune.profiler``.
"""
