"""How pytest-xdist shares the serial tests out among its processes: by groups, each in one process."""

from __future__ import annotations

from pathlib import PurePath

import pytest

JOBS = {"test_doctor", "test_endings", "test_engine_jobs", "test_lab", "test_launch", "test_probe", "test_deadlock"}
"""Modules that start jobs of several ranks, which mostly wait: one at a time, or they would disturb each other."""

FIRST = {**dict.fromkeys(JOBS, 0), "test_doc_pages": 1, "test_cuda_sim": 2}
"""Modules that take long begin first, in this order."""


def group_of(nodeid: str) -> str:
    """The jobs together; the laws by methods, whose kernels are compiled once; other modules by themselves."""
    path, _, rest = nodeid.partition("::")
    module = PurePath(path).stem
    if module in JOBS:
        return "jobs"
    method = rest.partition("[")[2].partition(":")[0].partition("-")[0] if module == "test_laws" else ""
    return f"{path} {method}"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: FIRST.get(item.path.stem, len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByGroups(config, log)
