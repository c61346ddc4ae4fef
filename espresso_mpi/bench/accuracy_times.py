"""Step times that were measured apart from the curves, and the seconds of a curve that follow from them.

Bits do not depend on the network, so a run goes through the same losses in every cell with the same ranks and nodes.
Only its steps take other times. Steps of one way can differ, because warm-ups send other messages than later steps, and
local steps send none; those that send about as many bytes are taken for alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .accuracy_runs import Run

_GAP = 0.25
"""Between bytes of one kind of steps and those of the next kind: a quarter of an octave, about a fifth."""

_FAR = 1.25
"""Between the bytes of a step and those of the nearest kind that was timed: more than an octave, for kinds are means of
steps, and now and then a payload is sent twice, where ranks did not make the call that was expected."""

_SILENT = 1024
"""Bytes of a local step at most: none but those of small agreements."""


@dataclass(frozen=True)
class StepTime:
    """What steps of one kind take.

    Attributes:
        way: its spec.
        sent: bytes that a rank sends in such a step, the mean.
        seconds: median of the slowest rank's times.
        steps: how many were measured.
    """

    way: str
    sent: float
    seconds: float
    steps: int


def step_times_of(way: str, sent: np.ndarray, seconds: np.ndarray) -> list[StepTime]:
    """The kinds of steps of one way, from bytes and seconds of each step in the order in which they were made.

    Of each kind, the later half counts: in the first steps kernels are compiled, and ``GradientSync`` finds out when to
    send.
    """
    order = np.argsort(sent, kind="stable")
    found = []
    for steps in np.split(order, np.flatnonzero(np.diff(np.log2(1 + sent[order])) > _GAP) + 1):
        later = np.sort(steps)[len(steps) // 2 :]
        found.append(StepTime(way, float(np.mean(sent[steps])), float(np.median(seconds[later])), len(later)))
    return found


def priced(run: Run, times: Sequence[StepTime], dense: int | None) -> Run | None:
    """The same run with the seconds that its steps take by ``times``; None: no step like some of them was timed.

    Args:
        times: of all ways; those of the run's way count.
        dense: the first steps, in which optimizers of other messages synchronise gradients; None: steps that send
            nothing may wait for messages, so it is not known when ranks compute.
    """
    own = [time for time in times if time.way == run.way]
    if not own:
        return None
    like = [min(own, key=lambda time: abs(_log(time.sent) - _log(count))) for count in run.sent_by_step]
    if any(abs(_log(time.sent) - _log(count)) > _FAR for time, count in zip(like, run.sent_by_step)):
        return None
    clock = np.concatenate([[0.0], np.cumsum([time.seconds for time in like])])
    curve = tuple(replace(point, seconds=float(clock[point.step])) for point in run.curve)
    return replace(run, curve=curve, computing=None if dense is None else _computing(like[dense:]))


def _computing(steps: Sequence[StepTime]) -> float | None:
    """The share of their time that is no waiting for averages, by those of them that send nothing; None without any."""
    local = [step.seconds for step in steps if step.sent < _SILENT]
    return len(steps) * local[0] / sum(step.seconds for step in steps) if local else None


def _log(sent: float) -> float:
    return math.log2(1 + sent)
