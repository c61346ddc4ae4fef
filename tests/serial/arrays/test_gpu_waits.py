"""Every place where the package waits for a GPU, or lets a stream wait, has a test that leaves the wait out."""

from __future__ import annotations

import ast
from pathlib import Path

import espresso_mpi

ROOT = Path(espresso_mpi.__file__).parent
TESTS = Path(__file__).parents[2] / "gpu_sim"

WORDS = {"hold", "passed", "drain", "synchronize"}

WITHOUT = {
    "arrays.device.copy": "test_async_device.py::test_a_missing_wait_is_found",
    "arrays.workspace.Staging.emptied": "test_staging.py::test_a_missing_wait_is_seen_by_these_tests",
    "collectives.data.cuda_sums.Counts.passed": "test_async_device.py::test_a_search_read_too_early_is_found",
    "collectives.messages.gpu_messages.GpuMessages.post": "test_async_device.py::test_a_missing_wait_is_found",
    "collectives.messages.gpu_messages.GpuMessages._staged": "test_async_device.py::test_a_missing_wait_is_found",
    "collectives.messages.gpu_messages.GpuMessages._fetch": (
        "test_pipeline.py::test_a_copy_in_that_does_not_wait_is_found"
    ),
    "collectives.messages.gpu_messages.GpuMessages.end": "test_async_device.py::test_a_missing_wait_is_found",
    "collectives.ranges.GpuSearch.passed": "test_async_device.py::test_a_search_read_too_early_is_found",
    "engine.gpu_ends.GpuEnds.settle": "test_async_device.py::test_a_missing_wait_is_found",
    "engine.inbox.Inbox._ready": "test_async_device.py::test_a_search_read_too_early_is_found",
    "engine.inbox.Inbox._is_there": "test_async_device.py::test_a_missing_wait_is_found",
}
"""The tests in which they wait for nothing, and results are wrong."""

NO_DATA = {
    "arrays.buffers._from_torch_cuda": "torch's own stream: not on a simulated device",
    "arrays.device.drain": "see those that call it",
    "arrays.device.poll": "see those that call it",
    "arrays.device.synchronize": "see those that call it",
    "arrays.device.Mark.wait": "see those that call it",
    "arrays.gpu_times.Stopwatch.seconds": "a time",
    "arrays.gpu_times.Moment.seconds": "a time",
    "autotune.samples._sampled": "values that are looked at, and change nothing",
    "torch.work._wait_for_copies": "torch's own stream: see mpi/torch/test_works.py",
    "autotune.profiling.codecs.Codecs._codec": "a time",
    "collectives.messages.gpu_calls.GpuCalls._ring": "a time",
    "collectives.messages.probe_program.arrives": "a process of its own, which compares what it gets",
    "engine.guard._checksum": "with debug=True",
    "engine.inbox.Inbox.put_back": "memory is freed after it",
}
"""Why there is none for the others."""


def waits():
    """The functions that do, by module and class; not those of benchmarks."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").parts
        if module[0] not in ("bench", "cluster") and module[:2] != ("collectives", "tables"):
            yield from (".".join((*module, name)) for name in _of(ast.parse(path.read_text(encoding="utf-8"))))


def _of(tree):
    owners = [("", tree), *((f"{node.name}.", node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for prefix, owner in owners:
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            if names & WORDS:
                yield prefix + function.name


def test_each_wait_has_a_test_without_it():
    assert set(waits()) == WITHOUT.keys() | NO_DATA.keys()
    for named in WITHOUT.values():
        file, test = named.split("::")
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), named
