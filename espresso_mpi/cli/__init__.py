"""The command ``espresso-mpi``.

- ``program``: the application and its exit codes.
- ``jobs``: the commands ``doctor``, ``run``, ``lab`` and ``demo``.
- ``measuring``: the commands ``bench ...``.
- ``planning``: the commands ``profile``, ``plan``, ``explain`` and ``timeline``.
- ``arguments``: options and arguments that several commands have.
- ``doctor``, ``demo``, ``warmup``, ``plan``, ``profile``, ``profile_show``, ``tables``: the work of commands that are
  no benchmarks.
- ``compiling``: says when kernels are compiled.

May import: everything. Commands import what they need when they run, so that ``--help`` is quick and loads neither
numba nor MPI. To add a command, write a function under ``@app.command()`` in the module of its group.
"""

from . import jobs, measuring, planning
from .program import app, main

__all__ = ["app", "jobs", "main", "measuring", "planning"]
