"""The process group "espresso" under the tests that torch has for its own backends."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")
from torch_suite import suite
from torch_suite.not_applicable import NOT_APPLICABLE

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.timeout(suite.LIMIT)]


def test_the_list_is_of_torch():
    """A test that torch has dropped, or named otherwise, must leave the list; no test is in it without a reason."""
    assert not set(NOT_APPLICABLE) - set(suite.NAMES)
    assert all(NOT_APPLICABLE.values())


@pytest.mark.parametrize("name", [name for name in suite.NAMES if name not in NOT_APPLICABLE])
def test_torch(name, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("store")) if suite.WORLD.rank == 0 else None
    suite.run(name, suite.WORLD.bcast(folder))
