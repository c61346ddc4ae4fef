"""Kernels where numba finds no directory for its cache: a warning, once, and no error."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_A_DIRECTORY = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
import logging
logging.basicConfig(level=logging.WARNING)
import espresso_mpi.bench.planner.random_cases
from espresso_mpi.files import json_scan
from espresso_mpi.planner import model_workload
assert json_scan.harmless(b'{"a": 1}', 8)
print(len(model_workload("lstm").tensors))
"""


def test_the_planner_works_where_no_cache_can_be_written():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_DIRECTORY], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled anew in every process") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr
