"""Measures a cluster, models a training step, chooses a strategy for every tensor.

>>> from espresso_mpi.planner import Profile, Trace, plan, save_plan
>>> made = plan(Trace.load("trace.json"), Profile.load("profile.json"))  # doctest: +SKIP
>>> save_plan(made, "plan.json")                                         # doctest: +SKIP

This package never imports MPI: a plan can be made on a laptop. docs/planner.md has the models and the algorithms.
"""

# ``plan`` and ``explain`` are functions of modules of the same name. They are imported here and now, because whoever
# imports such a module first would otherwise find the module under the function's name.
from .cluster import TESTBEDS, Cluster
from .explain import explain
from .models import MODELS, model_trace
from .plan import plan
from .planfile import load as load_plan
from .planfile import misfits
from .planfile import save as save_plan
from .profile import Profile
from .trace import Trace, TracedTensor
from .tree import routes

__all__ = [
    "MODELS",
    "TESTBEDS",
    "Cluster",
    "Profile",
    "Trace",
    "TracedTensor",
    "explain",
    "load_plan",
    "misfits",
    "model_trace",
    "plan",
    "routes",
    "save_plan",
]
