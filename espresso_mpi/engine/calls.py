"""One call on one rank: what was handed over, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.buffers import Gradient
from ..errors import EspressoError
from .batches import Batch
from .diagnostics import Call, Content, spelled
from .guard import Watch


class Unit:
    """One call on this rank: tensors handed over together, and what becomes of them.

    Attributes:
        call: what the calls of the ranks are matched by; title: the call in messages.
        given, gradients, batch: what the caller passed, the flat arrays over it, and what is known about them.
        problem: why this rank cannot make the call; bad: what is odd about its values, see ``ranges.Said``.
        large: positions of dense tensors whose sums could leave their range, as all ranks know when the call starts.
        priority: the higher, the sooner.
        action: run by itself, when nothing else is under way, once all ranks have made the call.
        gpu: the number of the GPU that the tensors are on.
        number: the call's bit in headers, once all know it; told: whether the others were told what is new about it;
            noticed: whether the log was told that it waits for long.
        since: when it was made.
        left: buckets that are not finished yet; parked: tensors that wait for the rest of their group.
        finished, error, result: how it ended.
        watch: finds tensors that the caller changes meanwhile; None where nobody could.
    """

    def __init__(
        self,
        call: Call,
        given: Any = None,
        gradients: Sequence[Gradient] = (),
        batch: Batch | None = None,
        problem: EspressoError | None = None,
        priority: float = 0.0,
        action: Callable[[], Any] | None = None,
        title: str = "",
        gpu: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.call, self.given, self.gradients, self.batch = call, given, list(gradients), batch
        self.title = title or spelled(call)
        self.problem, self.priority, self.action = problem, priority, action
        self.gpu, self.watch = gpu, watch
        self.number: int | None = None
        self.bad: dict[str, str] = {}
        self.large: frozenset[int] = frozenset()
        self.told = self.noticed = False
        self.since = time.perf_counter()
        self.left = self.parked = 0
        self.finished = False
        self.error: BaseException | None = None
        self.result: Any = given

    @property
    def content(self) -> Content:
        """What other ranks must have as well."""
        tensors = tuple((g.spec.name, str(g.spec), g.spec.device) for g in self.gradients)
        return Content(self.call, self.priority, tensors, self.batch.digest.hex() if self.batch else "")

    @property
    def key(self) -> tuple[Any, ...]:
        """Short for ``content``."""
        return (self.call, self.priority, self.batch.digest if self.batch else b"")

    def note(self) -> dict[str, Any]:
        """What the other ranks are told about a call that they do not know, or that is not as it should be."""
        if self.problem is not None:
            return {"call": list(self.call), "problem": [type(self.problem).__name__, str(self.problem)]}
        return {**self.content.note(), "problem": None, "bad": self.bad}
