"""Benchmarks: one module for each suite, with its tables beside it; ``report`` writes BENCHMARKS.md from their results.

``harness`` is what benchmarks of collectives share: inputs, checks, timing, rows, tables. ``defaults`` are those of the
suites and of their commands.

May import: everything but ``cli``. To add a suite, write a module with a function ``main`` and a table of columns, its
defaults, a command in ``cli.measuring``, and a section in ``report``.
"""
