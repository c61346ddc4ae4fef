"""What torch waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from espresso_mpi.torch.work import HandleWork  # noqa: E402


class Event:
    """An event of torch on a GPU that is slow: it is passed when somebody waits for it."""

    log: ClassVar[list] = []
    passed = False

    def record(self, stream):
        self.log.append(f"recorded on {stream.name}")

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True
        self.log.append("the host waits")


def test_an_operation_ends_when_its_copies_on_a_gpu_are_done(monkeypatch):
    """The thread that ends it queues them on its own stream: others wait for an event there, by stream or by host."""
    log, own = Event.log, "the engine's"
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda where: SimpleNamespace(name=f"{own} on {where}", wait_event=lambda event: log.append(f"{own} waits")),
    )
    result = SimpleNamespace(is_cuda=True, device="cuda:1", numel=lambda: 1)
    work = HandleWork([], [result], [lambda: log.append("copied")])
    assert log == ["copied", "recorded on the engine's on cuda:1"] and not work.is_completed()
    own = "the caller's"
    assert work.wait() and log[2:] == ["the caller's waits"] and not work.is_completed()
    assert work.get_future().wait() == [result] and log[3:] == ["the host waits"] and work.is_completed()


def test_an_operation_that_failed_has_no_copies(monkeypatch):
    def fail():
        raise ValueError("another shape")

    monkeypatch.setattr(torch.cuda, "Event", None)
    with pytest.raises(ValueError, match="another shape"):
        HandleWork([], [SimpleNamespace(is_cuda=True, device="cuda:1", numel=lambda: 1)], [fail]).wait()
