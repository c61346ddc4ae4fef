"""What torch waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from espresso_mpi.torch.work import HandleWork  # noqa: E402


def test_an_operation_ends_when_its_copies_on_a_gpu_are_done(monkeypatch):
    """The thread that ends it queues them on its own stream, which nobody else waits for."""
    done, result = [], SimpleNamespace(is_cuda=True, device="cuda:1")
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: done.append(where) or stream)
    HandleWork([], [result], [lambda: done.append("queued")])
    assert done == ["queued", "cuda:1", "waited"]
