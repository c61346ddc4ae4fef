"""The process group "espresso" under the tests that torch has for its own backends."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from torch_suite import suite

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.mark.parametrize("name", suite.NAMES)
def test_torch(name):
    suite.run(name)
