"""What measurements leave uncertain, and which compression is not worth it for that reason.

Every curve of a profile may be wrong by a factor, which follows from the spread of its repetitions and from the errors
of its fit. The factor is common to all operations that the curve prices, so what two plans have in common cancels. It
is carried through the timeline, so hidden time does not count. Scale a curve up or down by its factor, and take the
larger change of the gain. The *noise* of a gain is the root of the sum of the squares of these changes over all curves.
For whole plans the backward pass, scaled by the spread of the measured steps, is one more term.

The rule: compression stays only where its gain exceeds its noise. Tensors that fail it by themselves are made dense
together if together they fail it as well. Else the half of them that gains least is tried, until no tensor fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from espresso_mpi.timetable import CHECK

from ..model.curve import Curve
from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import TIE, Timeline
from .swaps import best_of_each, swapped, swaps_of, with_options

Key = tuple[Any, ...]
"""Names a curve of the profile."""

_BACKWARD: Key = ("backward",)
_SIGNS = (1.0, -1.0)


@dataclass(frozen=True)
class Gain:
    """By how much one choice is quicker than another, in seconds, and what is uncertain in that."""

    seconds: float
    noise: float

    @property
    def real(self) -> bool:
        """Whether it exceeds its noise."""
        return self.seconds > self.noise


@dataclass(frozen=True)
class Doubts:
    """A problem whose operations may take longer or shorter than priced.

    Attributes:
        noise: relative error of every operation; None: of each what its curve's samples and fit say.
    """

    problem: Problem
    noise: float | None = None

    def curves(self, option: int) -> list[Key]:
        """By which curve each operation of an option is priced."""
        compressor, keys = self.problem.strategy(option).compressor, list[Key]()
        for slot in self.problem.operations(option):
            if slot.kind == "check":
                keys.append((CHECK, slot.device))
            elif slot.kind == "move":
                keys.append(("move", slot.op, slot.level, slot.alone))
            elif slot.kind == "copy":
                keys.append(("copy", "to_gpu" if slot.device == "gpu" else "to_host"))
            else:
                keys.append((slot.kind, compressor, slot.device))
        return keys

    def error(self, key: Key) -> float:
        """The relative error of a curve."""
        return self.noise if self.noise is not None else relative_error(self.problem.profile, _curve(self, key))

    def scaled(self, option: int) -> dict[tuple[Key, float], np.ndarray]:
        """The seconds of an option's operations with each uncertain curve scaled up and down: float64 (operations,)."""
        if option not in self._scaled:
            keys, seconds = self.curves(option), self.problem.timeline.options.seconds[option]
            found = {}
            for key in dict.fromkeys(keys):
                error = self.error(key)
                own = np.array([k == key for k in keys] + [False] * (seconds.size - len(keys)))
                for sign in _SIGNS if error else ():
                    found[key, sign] = seconds * np.where(own, max(0.0, 1 + sign * error), 1.0)
            self._scaled[option] = found
        return self._scaled[option]

    @cached_property
    def _scaled(self) -> dict[int, dict[tuple[Key, float], np.ndarray]]:
        return {}

    # --- whole choices ---

    def responses(self, choice: np.ndarray, which: np.ndarray, spread: float = 0.0) -> dict[tuple[Key, float], float]:
        """F of a choice with each curve scaled up and down where it prices one of some tensors.

        Args:
            which: bool (tensors,); spread: relative error of the backward pass, 0: it is certain.
        """
        timeline, options = self.problem.timeline, np.unique(choice[which])
        keys = dict.fromkeys(key for option in options for key in self.scaled(int(option)))
        found = {key: self._response(choice, which, options, key) for key in keys}
        for sign in _SIGNS if spread else ():
            stretched = replace(timeline, backward=timeline.backward * max(0.0, 1 + sign * spread))
            found[_BACKWARD, sign] = stretched.seconds(choice)
        return found

    def _response(self, choice: np.ndarray, which: np.ndarray, options: np.ndarray, key: tuple[Key, float]) -> float:
        timeline = self.problem.timeline
        places = {int(option): timeline.options.count.size + n for n, option in enumerate(options)}
        seconds = np.array([self.scaled(option).get(key, timeline.options.seconds[option]) for option in places])
        moved = np.array([places[int(option)] if own else option for option, own in zip(choice, which)], np.int64)
        return with_options(timeline, options, seconds).seconds(moved)

    # --- single tensors ---

    def single(self, choice: np.ndarray, instead: np.ndarray) -> list[Gain | None]:
        """Of each tensor what its option gains over another one, all other tensors as they are; None: it is the same.

        Args:
            instead: int64 (tensors,), the other option of each.
        """
        timeline, trials = self.problem.timeline, _Trials(self)
        asked = [i for i in range(choice.size) if choice[i] != instead[i]]
        plain = timeline.seconds(choice)
        questions = []
        for i in asked:
            ours, other = int(choice[i]), int(instead[i])
            keys = dict.fromkeys([*self.scaled(ours), *self.scaled(other)])
            ahead = trials.ask(i, other)
            questions.append((i, ahead, [(key, trials.ask(i, ours, key), trials.ask(i, other, key)) for key in keys]))
        times = trials.answers(timeline, choice)
        found: list[Gain | None] = [None] * choice.size
        for i, ahead, pairs in questions:
            gain = _difference(float(times[ahead]), plain)
            found[i] = Gain(gain, _noise(gain, {key: float(times[other] - times[ours]) for key, ours, other in pairs}))
        return found


class _Trials:
    """Swaps that are asked for one after the other and answered together."""

    def __init__(self, doubts: Doubts) -> None:
        self.doubts = doubts
        self.options: dict[tuple[int, tuple[Key, float] | None], int] = {}
        self.like: list[int] = []
        self.seconds: list[np.ndarray] = []
        self.places: dict[tuple[int, int], int] = {}
        self.tensors: list[int] = []
        self.asked: list[int] = []

    def ask(self, tensor: int, option: int, key: tuple[Key, float] | None = None) -> int:
        """The place of the answer: F with the tensor on the option, scaled by the curve where it is priced by it."""
        scaled = None if key is None else self.doubts.scaled(option).get(key)
        if scaled is None:
            place = option
        elif (option, key) not in self.options:
            place = self.options[option, key] = self.doubts.problem.timeline.options.count.size + len(self.like)
            self.like.append(option)
            self.seconds.append(scaled)
        else:
            place = self.options[option, key]
        if (tensor, place) not in self.places:
            self.places[tensor, place] = len(self.asked)
            self.tensors.append(tensor)
            self.asked.append(place)
        return self.places[tensor, place]

    def answers(self, timeline: Timeline, choice: np.ndarray) -> np.ndarray:
        """All answers, float64 (asked,)."""
        if self.like:
            timeline = with_options(timeline, np.array(self.like, np.int64), np.array(self.seconds))
        return swapped(timeline, choice, np.array(self.tensors, np.int64), np.array(self.asked, np.int64))


def relative_error(profile: Profile, curve: Curve) -> float:
    """By how much a curve may be wrong, relative: its medians and the residual of the fit, added as squares.

    A curve without samples in a measured profile has what is typical of that profile; one of a description, none.
    """
    medians = curve.uncertainty if curve.samples else profile.noise() if profile.measured else 0.0
    return math.hypot(medians, curve.residual)


def _curve(doubts: Doubts, key: Key) -> Curve:
    profile, (kind, *rest) = doubts.problem.profile, key
    if kind == CHECK:
        return profile.checking(*rest)
    if kind == "move":
        return profile.move(*rest)
    if kind == "copy":
        return profile.copy(*rest)
    spec, device = rest
    return profile.codec(spec, device, kind)


def _noise(gain: float, scaled: Mapping[tuple[Key, float], float]) -> float:
    """The noise of a gain from what it is with each curve scaled."""
    most: dict[Key, float] = {}
    for (key, _), other in scaled.items():
        most[key] = max(most.get(key, 0.0), abs(other - gain))
    return math.sqrt(sum(change**2 for change in most.values()))


def _difference(a: float, b: float) -> float:
    return 0.0 if abs(a - b) <= TIE * max(a, b) else a - b


def gain_over(
    ours: tuple[Doubts, np.ndarray], other: tuple[Doubts, np.ndarray], which: np.ndarray | None = None,
    spread: float = 0.0,
) -> Gain:  # fmt: skip
    """What a choice gains over another one, of the same or another problem.

    Args:
        which: bool (tensors,), the tensors whose operations are in doubt; None: all.
        spread: relative error of the backward pass.
    """
    plain, responses = [], []
    for doubts, choice in (ours, other):
        plain.append(doubts.problem.timeline.seconds(choice))
        responses.append(doubts.responses(choice, np.ones(choice.size, bool) if which is None else which, spread))
    gain = _difference(plain[1], plain[0])
    keys = dict.fromkeys([*responses[0], *responses[1]])
    return Gain(gain, _noise(gain, {k: responses[1].get(k, plain[1]) - responses[0].get(k, plain[0]) for k in keys}))


# --- the rule ---------------------------------------------------------------------------------------------------------


def without_noise(doubts: Doubts, choice: np.ndarray) -> np.ndarray:
    """The choice with only such compression as gains more than its noise; see the module.

    In the order ``schedule`` the gains of single tensors are those with the keys as they are. So every change is looked
    at once more with schedules of its own, and a tensor that gains by them stays compressed.
    """
    choice, kept = choice.copy(), np.zeros(choice.size, bool)
    while True:
        dense = best_dense(doubts.problem, choice)
        gains = doubts.single(choice, dense)
        packed = doubts.problem.method[choice] >= 0
        failing = [i for i, gain in enumerate(gains) if gain is not None and packed[i] and not (gain.real or kept[i])]
        failing.sort(key=lambda i: gains[i].seconds)  # type: ignore[union-attr]
        other = _made_dense(doubts, choice, dense, failing, kept)
        if other is None:
            return choice
        choice = other


def _made_dense(
    doubts: Doubts, choice: np.ndarray, dense: np.ndarray, failing: list[int], kept: np.ndarray
) -> np.ndarray | None:
    """The choice with as many of the failing tensors dense as fail together; None: each gains, and is ``kept``."""
    most = len(failing)
    for begin, tensor in enumerate(failing):
        while most:
            which = np.isin(np.arange(choice.size), failing[begin : begin + most])
            other = np.where(which, dense, choice)
            if not gain_over((doubts, choice), (doubts, other), which).real:
                return other
            most //= 2
        kept[tensor], most = True, 1
    return None


def best_dense(problem: Problem, choice: np.ndarray) -> np.ndarray:
    """Of each compressed tensor the dense option with which the step is shortest, all others as they are.

    Returns:
        int64 (tensors,); a tensor that is dense has the option that it has.
    """
    packed, found = problem.method[choice] >= 0, choice.copy()
    tensors, options = swaps_of(problem, problem.method < 0)
    tensors, options = tensors[packed[tensors]], options[packed[tensors]]
    times = swapped(problem.timeline, choice, tensors, options)
    found[packed] = options[best_of_each(tensors, times, problem.alone[options], problem.tensors)[packed]]
    return found
