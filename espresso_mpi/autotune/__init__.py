"""plan="auto": watching steps, measuring the cluster, trying plans, choosing one.

``clock`` tells steps apart, ``holding`` keeps pushes of recorded steps; ``profiler`` measures the cluster, by the
parts in ``profiling``, through a ``measuring_session`` and beside a ``synthetic_load``; ``autoplan`` makes plans, and
``trials`` decides which of them the next steps follow. ``tuner`` does all of it in order.

May import: ``engine``, ``planner``, ``collectives`` and what is below them. Its settings are ``options.Tuning``.
"""
