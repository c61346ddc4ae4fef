"""Benchmarks: one module for each suite, with its tables beside it; ``report`` writes BENCHMARKS.md from their results.

May import: everything but ``cli``. To add a suite, write a module with a function ``main``, a command in
``cli.measuring``, and a section in ``report``.
"""
