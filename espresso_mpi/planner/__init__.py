"""Measures a cluster, models a training step, chooses a strategy for every tensor.

>>> from espresso_mpi.planner import Profile, Workload, plan, save_plan
>>> made = plan(Workload.load("workload.json"), Profile.load("profile.json"))  # doctest: +SKIP
>>> save_plan(made, "plan.json")                                         # doctest: +SKIP

This package never imports MPI: a plan can be made on a laptop. docs/planner.md describes the model and the algorithms.

- ``plan``: makes plans.
- ``planfile``: saves and loads plans.
- ``explain``, ``pictures``, ``lane_tables``: show plans.
- ``search``: chooses strategies.
- ``workloads``: models and clusters that come with the library.
- ``model``: the time of a training step.

May import: ``compressors``, ``tracing`` and the layers below them. To let plans do something new, add it to ``model``
first, then to ``search``.
"""

# ``plan`` and ``explain`` are functions of modules of the same name. They are imported here and now, because whoever
# imports such a module first would otherwise find the module under the function's name.
from .explain import explain
from .model.profile import Profile
from .model.tree import routes
from .model.workload import Workload, WorkloadTensor
from .plan import plan
from .planfile import load as load_plan
from .planfile import misfits
from .planfile import save as save_plan
from .workloads.clusters import TESTBEDS, Cluster
from .workloads.models import MODELS, model_workload

__all__ = [
    "MODELS",
    "TESTBEDS",
    "Cluster",
    "Profile",
    "Workload",
    "WorkloadTensor",
    "explain",
    "load_plan",
    "misfits",
    "model_workload",
    "plan",
    "routes",
    "save_plan",
]
