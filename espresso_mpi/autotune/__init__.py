"""plan="auto": watching steps, measuring the cluster, trying plans, choosing one.

``clock`` tells steps apart, ``holding`` keeps pushes of recorded steps; ``profiler`` measures the cluster, by the
parts in ``profiling``; ``replay`` runs a step with a plan, ``synthetic_load`` computes meanwhile; ``autoplan`` does all
of it in order.

May import: ``engine``, ``planner``, ``collectives`` and what is below them. Its settings are ``options.Tuning``.
"""
