"""``--quick`` runs each thing once: see the section on it in CONTRIBUTING.md."""

from __future__ import annotations

import gc

import pytest
from selection import deselect


def pytest_addoption(parser):
    what = "leave out what other tests cover too: what is marked `thorough`, and tests/mpi on ranks not in its RANKS"
    parser.addoption("--quick", action="store_true", help=what)
    parser.addoption("--torch-device", default=None, help="where tests/mpi/torch makes its tensors: cuda on a GPU")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """The garbage collector leaves out what is there for the whole run: modules and tests, which it would go through
    again and again."""
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)  # by its usual thresholds, it takes 5 % of the time
    gc.enable()


def pytest_collection_modifyitems(config, items):
    if config.getoption("quick"):
        deselect(config, items, lambda item: item.get_closest_marker("thorough"))
