"""The command ``espresso-mpi``.

``program`` has the application and its exit codes; ``jobs``, ``measuring`` and ``planning`` have its commands: names,
options and help. ``doctor``, ``demo``, ``plan``, ``profile`` and ``profile_show`` do the work of commands that are no
benchmarks.

May import: everything. Commands import what they need when they run, so that ``--help`` is quick and loads neither
numba nor MPI. To add one, write a function under ``@app.command()`` in the module of its group.
"""

from . import jobs, measuring, planning
from .program import app, main

__all__ = ["app", "jobs", "main", "measuring", "planning"]
