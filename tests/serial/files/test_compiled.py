"""Kernels where numba finds no directory for its cache: a warning, once, and no error."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

from espresso_mpi.files import compiled

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


def test_a_long_compilation_is_said_once(caplog, monkeypatch):
    """Only of this library's kernels, when they have taken a second in all."""
    clock = itertools.count()
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: 0.6 * next(clock))  # each compilation takes 0.6 s
    announcer = compiled._Announcer()

    def compile_one(module):
        event = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})
        announcer.on_start(event)
        announcer.on_end(event)

    with caplog.at_level("INFO", "espresso_mpi"):
        for _ in range(3):
            compile_one("somebody.else")
        compile_one("espresso_mpi.compressors.kernels.cpu.signs")
        assert not caplog.records
        for _ in range(3):
            compile_one("espresso_mpi.compressors.kernels.cpu.signs")
    assert [record.message.split(",")[0] for record in caplog.records] == ["compiling kernels"]
