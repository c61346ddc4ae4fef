"""Steps of a route for all tensors of a payload bucket, as Python runs them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..arrays import device
from .data.layout import Dense
from .data.reduction import stored
from .messages.joint import JointRegions
from .messages.transport import Transport
from .messages.window import SharedWindow
from .ops.allreduce import summed
from .ops.base import Action, Data, Move, idle, operations, window_or_messages
from .program import MoveStep
from .progress import DONE, Progress
from .segment_run import SegmentLog, SegmentRun
from .tables.emission import shares

Stage = Callable[["BucketRun"], Progress]
"""One step of the route for all tensors of a bucket."""


@dataclass
class BucketRun:
    """A bucket under way: its tensors, and the payload buffer that they share."""

    tensors: Sequence[SegmentRun]
    logs: Sequence[SegmentLog]
    data: Data


def in_turn(stages: Sequence[Stage]) -> Stage:
    """Stages as one; each is asked for when the one before has ended."""
    return stages[0] if len(stages) == 1 else lambda run: itertools.chain.from_iterable(act(run) for act in stages)


def _in_step(transport: Transport, actions: Sequence[Action], run: BucketRun) -> Progress:
    """Run a collective of each tensor, all of them in the same progress steps; each has scratch memory of its own."""
    kinds = [("in step", tensor.data.x.size.bit_length()) for tensor in run.tensors]  # many, of very different sizes
    spaces = [transport.borrow(kind) for kind in kinds]
    data = [replace(tensor.data, workspace=space, saturated=0) for tensor, space in zip(run.tensors, spaces)]
    left = [action(one) for action, one in zip(actions, data)]
    while left := [progress for progress in left if next(progress, DONE) is not DONE]:
        yield
    for tensor, one, space, kind in zip(run.tensors, data, spaces, kinds):
        tensor.data.saturated += one.saturated
        transport.give_back(space, kind)


# --- collectives ------------------------------------------------------------------------------------------------------


def payload_sum(transport: Transport, op: str, move: Move) -> Stage:
    """The payloads without their headers, side by side, are summed as one array."""
    regions, inner = summed(move)
    if not regions:
        return partial(idle, phases=operations()[op].phases)
    edges = list(itertools.accumulate((region.size for region in regions), initial=0))
    action = operations()[op].bind(transport, replace(inner, before=(Dense(0, edges[-1]),) * len(move.group)))

    def run(bucket: BucketRun) -> Progress:
        data = bucket.data
        bodies = data.payload.view(stored(inner.dtype))
        parts = [bodies[region.start : region.stop] for region in regions]
        joined = Data(data.workspace.array("bodies", edges[-1], bodies.dtype, "cpu"), inner.dtype, data.workspace)
        device.join(joined.x, parts)
        yield from action(joined)
        device.part(joined.x, parts)
        bucket.tensors[0].data.saturated += joined.saturated  # all count in one place

    return run


def dense_collective(transport: Transport, op: str, moves: Sequence[MoveStep]) -> Stage:
    """A collective on dense tensors: through the window for all at once, where the operation is known there."""
    apart = [operations()[op].bind(transport, step.move) for step in moves]
    joint = _joint_regions(op, moves)
    if joint is None:
        return lambda run: _in_step(transport, apart, run)
    group, divisor = moves[0].move.group, moves[0].move.reduce_op.divisor

    def by_window(window: SharedWindow, bucket: BucketRun) -> None:
        arrays = [tensor.data.x for tensor in bucket.tensors]
        if op == "allgather":
            window.allgather_joint(arrays, joint)
        else:
            window.reduce_scatter_joint(arrays, joint, divisor)

    return window_or_messages(
        transport, group, lambda bucket: bucket.tensors[0].data.x, by_window, partial(_in_step, transport, apart)
    )


def _joint_regions(op: str, moves: Sequence[MoveStep]) -> JointRegions | None:
    if op == "allgather":
        owned = [step.move.before for step in moves]
    elif op == "reduce_scatter":
        owned = [tuple(operations()[op].advance(step.move.context, step.move.before)) for step in moves]
    else:
        return None
    return JointRegions.of([[(r.start, r.stop) for r in regions if isinstance(r, Dense)] for regions in owned])


@dataclass(frozen=True)
class Recorded:
    """Records a collective of a bucket as one of each tensor.

    Every tensor has the time from the first progress step to the last one. Of what was sent and of the time in which
    the rank only waited, each has the share that its own bytes are of all.
    """

    transport: Transport
    moves: Sequence[MoveStep]

    @property
    def nbytes(self) -> list[int]:
        """The bytes that each tensor sends."""
        return [operations()[step.op].sent(step.move) for step in self.moves]

    def of(self, stage: Stage) -> Stage:
        """The same stage, recorded."""
        op, level, nbytes = self.moves[0].op, self.moves[0].move.context.level, self.nbytes
        what = f"{op}@{level}"

        def run(bucket: BucketRun) -> Progress:
            transport, progress, first = self.transport, stage(bucket), time.perf_counter()
            intra = inter = 0
            going = True
            while going:
                start, before, waited = time.perf_counter(), transport.sent, transport.waiter.waited
                going = next(progress, DONE) is not DONE
                after, waited = transport.sent, transport.waiter.waited - waited
                intra, inter = intra + after["intra"] - before["intra"], inter + after["inter"] - before["inter"]
                if waited > 0:
                    for log, (a, b) in zip(bucket.logs, shares(waited, nbytes)):
                        log.add("wait", start + a, start + b, what, level)
                if going:
                    yield
            stop = time.perf_counter()
            sent = zip(_whole_shares(intra, nbytes), _whole_shares(inter, nbytes))
            for log, (inside, between) in zip(bucket.logs, sent):
                log.add("wire", first, stop, what, level, inside, between)

        return run


def _whole_shares(total: int, weights: Sequence[int]) -> list[int]:
    """A number cut in proportion to weights, in whole numbers."""
    return [round(b) - round(a) for a, b in shares(total, weights)]
