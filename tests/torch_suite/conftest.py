"""torch's own tests of backends: outcomes are gathered, so that a test that fails on one rank fails on all."""

from __future__ import annotations

import pytest
from mpi4py import MPI
from rank_outcomes import *  # noqa: F403

_RAN: dict[str, str] = {}


@pytest.hookimpl
def pytest_runtest_logreport(report):
    if "test_torch[" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _RAN[report.nodeid] = report.outcome


def pytest_terminal_summary(terminalreporter):
    """What became of each test: none is left out without a word."""
    if MPI.COMM_WORLD.rank or not _RAN:
        return
    from torch_suite import suite
    from torch_suite.not_applicable import NOT_APPLICABLE

    passed = sum(outcome == "passed" for outcome in _RAN.values())
    terminalreporter.section("torch's tests of backends")
    for name, reason in NOT_APPLICABLE.items():
        terminalreporter.line(f"not applicable: {name}: {reason}")
    terminalreporter.line(
        f"{len(suite.NAMES)} tests: {len(_RAN)} run, {passed} passed, {len(NOT_APPLICABLE)} not applicable"
    )
