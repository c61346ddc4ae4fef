"""Kernels where numba finds no directory for its cache: a warning, once, and no error."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from espresso_mpi.files import compiled, one_process, sources

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


def test_the_garbage_collector_runs_again_after_a_compilation():
    with compiled._no_collection(), compiled._no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with compiled._no_collection():
            pass
        assert not gc.isenabled(), "who has switched it off wants it off"
    finally:
        gc.enable()


COMPILING = """
import sys, time
from numba.core import event
from numba.core.ccallback import CFunc

class Counter(event.Listener):
    count = 0
    def on_start(self, event): Counter.count += 1
    def on_end(self, event): time.sleep(0.3)  # the others come meanwhile

event.register("numba:compile", Counter())
compile_now = CFunc._compile_uncached  # numba has no event for it
CFunc._compile_uncached = lambda self: (compile_now(self), time.sleep(0.3))[0]
sys.path.insert(0, sys.argv[1])
from kernels_of_a_test import power, power_by_address
print(Counter.count, power(2.0, 5), power(3, 2), Counter.count)
made = power_by_address()
print(made.ctypes(5), made.cache_hits)
"""

KERNELS = """
from numba import float64, int64
from espresso_mpi.files.compiled import c_function, compiled
from espresso_mpi.files.sources import with_digest

@compiled
def times(x, y):
    return x * y

@compiled
def power(x, n):
    return x if n == 1 else times(x, power(x, n - 1))

@with_digest
def squares(n):
    return power(2.0, n)

def power_by_address():
    return c_function(float64(int64), squares)
"""


def test_processes_that_need_the_same_kernels_compile_them_once(tmp_path):
    """Each signature of a recursive function, of the one that it calls, and of one that C code calls."""
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    command = [sys.executable, "-c", COMPILING, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert [(*words[:3], words[4]) for words in said] == [("0", "32.0", "9", "32.0")] * 3, said
    counts = sorted(int(words[3]) for words in said)
    assert sum(counts) == 4, counts  # two functions, two signatures
    assert sum(int(words[5]) for words in said) == 2, said
    assert not list(tmp_path.rglob("*.lock"))


SUMMING = """
from numba import int64
from espresso_mpi.files.compiled import c_function, compiled, is_compiled
from espresso_mpi.files.sources import with_digest
from .. import middle  # and what this imports

@compiled
def add(x):
    return x + middle.ONE

@with_digest
def add_by_address(x):
    return x + middle.ONE

new = not is_compiled(add)
made = c_function(int64(int64), add_by_address)
print(add(1), sum(add.stats.cache_misses.values()), made.ctypes(1), int(made.cache_hits == 0))
print(int(new and is_compiled(add)))
"""


def test_what_was_compiled_from_other_sources_is_not_used(tmp_path):
    """Only a module changes that the module with the kernels imports by another one."""

    def run(way):
        command = [sys.executable, "-B", way, "package_of_a_test.deep.summing"]
        if way == "-c":
            command[-1] = f"import {command[-1]}"
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path).stdout

    package = tmp_path / "package_of_a_test"
    (package / "deep").mkdir(parents=True)
    for folder in (package, package / "deep"):
        (folder / "__init__.py").touch()
    (package / "deep" / "summing.py").write_text(SUMMING)
    (package / "middle.py").write_text("from .constants import ONE as ONE\n")
    for value, way, misses in ((1, "-c", 1), (1, "-m", 1), (2, "-m", 1), (2, "-m", 0), (1, "-c", 0)):
        (package / "constants.py").write_text(f"ONE = {value}\n")
        assert run(way).split() == [*[str(1 + value), str(misses)] * 2, str(misses)], (value, way)
    for path in tmp_path.rglob("summing.add*.nb?"):
        os.utime(path, (0, 0))
    (package / "constants.py").write_text("ONE = 3\n")
    assert run("-c").split()[:2] == ["4", "1"]
    assert len(list(tmp_path.rglob("summing.add_????????-*.nbc"))) == 1  # the old ones were removed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from .c import (  # one (1)\n    A as B,\n    D,\n)", ["p.q.c.A", "p.q.c.D"]),
        ("from ..c.d import *", ["p.c.d.*"]),
        ("from . import c; x = 1", ["p.q.c"]),
        ("from .c import \\\n    A", ["p.q.c.A"]),
        ("import os, r.s as t", ["os", "r.s"]),
        ("from r.s import A, B\nif x:\n    from r import C", ["r.s.A", "r.s.B"]),
    ],
)
def test_imports_are_found_as_they_are_written(text, names):
    assert list(sources._names(text, ["p", "q"])) == names


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(one_process, "PATIENCE_S", 0.05)
    monkeypatch.setattr(one_process.OneProcess, "patient", True)
    path = tmp_path / "f.lock"
    with path.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        ours = one_process.OneProcess(path)
        ours.acquire()
        ours.release()
        assert path.exists() and not ours.patient, "the file of another process was removed"
        monkeypatch.setattr(one_process, "PATIENCE_S", 1e9)
        ours.acquire()  # does not wait again
        ours.release()
    monkeypatch.setattr(one_process.OneProcess, "patient", True)
    ours.acquire()
    ours.acquire()
    ours.release()
    assert path.exists()
    ours.release()
    assert not path.exists()


def test_without_a_directory_for_locks_kernels_are_compiled(tmp_path):
    lock = one_process.OneProcess(tmp_path / "missing" / "f.lock")
    lock.acquire()
    lock.release()
