"""A pending call on one rank: its arguments, its state and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.buffers import Gradient
from ..errors import EspressoError
from .batches import Batch
from .diagnostics import CallKey, Content, spelled
from .guard import Watch


class PendingCall:
    """One call of ``sync`` or ``push``, or a collective action, from its arrival to its end.

    Attributes:
        key: identifies the matching calls of other ranks.
        title: the call in messages.
        given: what the caller passed.
        gradients: flat arrays over ``given``.
        batch: what is known about the tensors.
        problem: why this rank cannot make the call; None: it can.
        bad: values that cannot be summed, see ``ranges.Findings``.
        large: positions of dense tensors whose sums could leave their range; known when the call starts.
        priority: calls of a higher priority start earlier.
        action: instead of tensors: runs by itself, with no active segments, once all ranks have made the call.
        gpu: number of the GPU that the tensors are on.
        number: the call's bit in headers, once all ranks know it.
        announced: whether its description was sent to the other ranks.
        noticed: whether the log has a notice that it waits for long.
        since: when it was made.
        left: number of buckets that are not finished.
        waiting_tensors: number of tensors that wait for the rest of their group.
        finished, error, result: how it ended.
        watch: finds tensors that the caller changes in the meantime; None if it cannot.
    """

    def __init__(
        self,
        key: CallKey,
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
        self.key, self.given, self.gradients, self.batch = key, given, list(gradients), batch
        self.title = title or spelled(key)
        self.problem, self.priority, self.action = problem, priority, action
        self.gpu, self.watch = gpu, watch
        self.number: int | None = None
        self.bad: dict[str, str] = {}
        self.large: frozenset[int] = frozenset()
        self.announced = self.noticed = False
        self.since = time.perf_counter()
        self.left = self.waiting_tensors = 0
        self.finished = False
        self.error: BaseException | None = None
        self.result: Any = given

    @property
    def content(self) -> Content:
        """What must be equal on all ranks."""
        tensors = tuple((g.spec.name, str(g.spec), g.spec.device) for g in self.gradients)
        return Content(self.key, self.priority, tensors, self.batch.digest.hex() if self.batch else "")

    @property
    def signature(self) -> tuple[Any, ...]:
        """A short form of ``content``."""
        return (self.key, self.priority, self.batch.digest if self.batch else b"")

    def note(self) -> dict[str, Any]:
        """The description for other ranks of a call that is new to them, or that has a problem."""
        if self.problem is not None:
            return {"call": list(self.key), "problem": [type(self.problem).__name__, str(self.problem)]}
        return {**self.content.note(), "problem": None, "bad": self.bad}
