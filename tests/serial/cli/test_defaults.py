"""What a command takes for an option that is not given is what its function in Python takes."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from espresso_mpi.cli import jobs, measuring, planning, program

FUNCTIONS = {
    **{name: f"bench.{name}:main" for name in ("sync", "routes", "tensors", "overlap", "scaling", "validate")},
    **{name: f"bench.{name}:main" for name in ("compressors", "train", "optimizers", "accuracy", "fidelity", "report")},
    "collectives": "bench.collectives:main",
    "torch_steps": "bench.torch_steps:main",
    "planner": "bench.planner.suite:main",
    "measure_profile": "cli.profile:main",
    "show_profile": "cli.profile_show:main",
    "describe_profile": "cli.profile_show:describe_main",
    "plan": "cli.plan:plan_main",
    "explain": "cli.plan:explain_main",
    "timeline": "tracing.pictures:main",
    "warmup": "cli.warmup:main",
    "gpu_check": "bench.gpu.suite:main",
    "doctor": "cli.doctor:main",
    "run": "cluster.launch:run",
    "lab": "cluster.lab:run",
    "demo": "cli.demo:main",
}
"""By the name of the command's function."""

MEANT = {"plan": {"compressors", "output"}}
"""Differ on purpose: the function uses all that was profiled and writes only where it is told."""


def commands():
    """Every function that is a command, and groups that do something by themselves."""
    groups = (program.app, program.bench, program.profile)
    found = [command.callback for group in groups for command in group.registered_commands]
    return {one.__name__: one for one in [*found, program.profile.registered_callback.callback]}


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def test_every_command_is_compared():
    assert {module.__name__ for module in (jobs, measuring, planning)}  # they register the commands
    assert set(commands()) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_of_commands_are_those_of_their_functions(name):
    module, _, function = FUNCTIONS[name].partition(":")
    ours = defaults(getattr(import_module(f"espresso_mpi.{module}"), function))
    told = defaults(commands()[name])
    both = (ours.keys() & told.keys()) - MEANT.get(name, set())
    assert {key: told[key] for key in both} == {key: ours[key] for key in both}
