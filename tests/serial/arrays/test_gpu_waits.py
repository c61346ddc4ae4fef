"""Every place where the package waits for a GPU, or lets a stream wait, has a test that leaves the wait out."""

from __future__ import annotations

import ast
from pathlib import Path

import espresso_mpi

ROOT = Path(espresso_mpi.__file__).parent
TESTS = Path(__file__).parents[2] / "gpu_sim"

WORDS = {"hold", "passed", "drain", "synchronize", "poll"}
OF_EVENTS = {"wait", "query"}
"""Of marks and events: other objects have methods with these names as well."""

ASYNC, STAGING, PIPELINE = "test_async_device.py", "test_staging.py", "test_pipeline.py"
EARLY = (ASYNC, "def test_a_search_read_too_early_is_found(")
SENT = (ASYNC, '"messages are sent before they are copied out": (')
WITHOUT = {
    "arrays.device.copy": (ASYNC, '"the host reads before a copy is done": (no_drain_in("copy")'),
    "arrays.workspace.Staging.emptied": (STAGING, '(Staging, "emptied", True)'),
    "collectives.data.cuda_sums.Counts.passed": EARLY,
    "collectives.messages.gpu_messages.GpuMessages.post": SENT,
    "collectives.messages.gpu_messages.GpuMessages._staged": (ASYNC, 'written them": (no_hold_in("_staged")'),
    "collectives.messages.gpu_messages.GpuMessages._fetch": (PIPELINE, 'f_code.co_name == "_fetch" else hold('),
    "collectives.messages.gpu_messages.GpuMessages.end": (ASYNC, 'copied in": (no_hold_in("end")'),
    "collectives.ranges.GpuSearch.passed": EARLY,
    "engine.gpu_ends.GpuEnds.settle": (ASYNC, '"a call ends before the device": ('),
    "engine.inbox.Inbox._ready": EARLY,
    "engine.inbox.Inbox._is_there": (ASYNC, '"a call does not wait for the caller\'s stream": ('),
}
"""What a test file has in which they wait for nothing, and results are wrong."""

NO_DATA = {
    "arrays.buffers._from_torch_cuda": "torch's own stream: not on a simulated device",
    "arrays.device.drain": "see those that call it",
    "arrays.device.poll": "see those that call it",
    "arrays.device.synchronize": "see those that call it",
    "arrays.device.Mark.hold": "see those that call it",
    "arrays.device.Mark.passed": "see those that call it",
    "arrays.device.Mark.wait": "see those that call it",
    "arrays.gpu_times.Stopwatch.seconds": "a time",
    "arrays.gpu_times.Moment.seconds": "a time",
    "arrays.gpu_times._Reference.__init__": "a time",
    "autotune.profiling.codecs.Codecs._codec": "a time",
    "collectives.messages.gpu_messages._seconds": "a time",
    "collectives.messages.probe_program.arrives": "a process of its own, which compares what it gets",
    "engine.guard._checksum": "with debug=True",
    "engine.gpu_ends.GpuEnds.wait": "it asks whether a call has ended: see settle",
    "engine.inbox.Inbox.put_back": "memory is freed after it",
    "engine.inbox.Inbox.wait": "it asks whether a call is ready: see _ready",
    "torch.work.HandleWork._copied_and_checked": "torch's own stream: see mpi/torch/test_works.py",
    "torch.work.HandleWork.is_completed": "the same",
}
"""Why there is none for the others."""


def waits():
    """The functions that do, by module and class; not those of benchmarks."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").parts
        if module[0] not in ("bench", "cluster") and module[-1] != "probe" and module[:2] != ("collectives", "tables"):
            yield from (".".join((*module, name)) for name in _of(ast.parse(path.read_text(encoding="utf-8"))))


def _of(tree):
    owners = [("", tree), *((f"{node.name}.", node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for prefix, owner in owners:
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            if any(map(_waits, ast.walk(function))):
                yield prefix + function.name


def _waits(node):
    if isinstance(node, ast.Name):
        return node.id in WORDS
    if not isinstance(node, ast.Attribute):
        return False
    owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
    return node.attr in WORDS or (node.attr in OF_EVENTS and any(word in owner for word in ("mark", "event")))


def test_each_wait_has_a_test_without_it():
    assert set(waits()) == WITHOUT.keys() | NO_DATA.keys()
    for file, text in WITHOUT.values():
        assert text in (TESTS / file).read_text(encoding="utf-8"), text
