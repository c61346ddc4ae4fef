"""What a compressor makes of a tensor's own gradients, as the optimizer gets it; and what is too much.

While a session watches its first steps, it keeps a sample of every gradient (``Samples``). Before it plans, each
compressor runs over these consecutive steps with its error feedback, as one encode of a route would. What an optimizer
makes of the gradients, and of what came out of the compressor, is compared (``error_of``):

    error = ‖h(what came out) − h(gradients)‖ / ‖h(gradients)‖

``sgd``: h is the momentum m = Σ 0.9ᵏ g, so the error is that of what feedback has not delivered in time. ``adam``: the
larger of the errors of m and of √v, with the moments of Adam (Kingma and Ba, 2015): signs and selections spoil the
second one.

Where the messages are momenta, along which the optimizer moves, the error is that of what has not been delivered after
``WINDOW`` messages. ``sgd-momentum``: h is the sum of the momenta. ``adam-momentum``: each of them is divided by √v, so
small elements move as far as large ones. The error is the mean over the elements that move of

    min(1, |Σ what came out − Σ momenta| / Σ |momenta|)

None of these depends on the scale of the gradients. docs/auto.md has the losses behind the budgets.

Where the mean over the ranks exceeds the budget of the level for a tensor, the compressor is barred for this tensor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from .. import compressors
from ..arrays.buffers import Gradient
from ..collectives.messages.agreement import first_failure, floats, on_every_rank
from ..collectives.messages.transport import Transport
from ..compressors import Compressor, Context
from ..errors import PlanError
from ..feedback import Feedback
from ..tuning import ALWAYS_ACCURATE, FOR_MOMENTA, LIKE_FP32, Accuracy, OptimizerRule, Tuning
from .samples import WINDOW, Samples

if TYPE_CHECKING:
    from ..planner.model.workload import Workload

_LOG = logging.getLogger("espresso_mpi")

DRIFT = 2.0
"""By how much more methods for matrices are expected to lose later on: first gradients have few large singular values.
From the first steps to the middle of 250, the error of ``powersgd:rank=4`` rose 1.3 times (GPT, AdamW) and 1.8 times
(LSTM, AdamW); that of block quantisers 1.0 to 1.4 times, far below their budget."""

BETA_1, BETA_2 = 0.9, 0.999
"""Of the moments; the first is that of ``sgd``, too."""

BUDGETS: Mapping[Accuracy, Mapping[OptimizerRule, float]] = {
    "safe": {"adam": 0.13, "sgd": 0.1, "adam-momentum": 0.36, "sgd-momentum": 0.4},
    "balanced": {"adam": 0.22, "sgd": 0.18, "adam-momentum": 0.5, "sgd-momentum": 0.6},
    "fast": dict.fromkeys(get_args(OptimizerRule), math.inf),
}
"""The largest error of a tensor at each level; docs/auto.md has the losses that they come from."""

RULES: tuple[OptimizerRule, ...] = get_args(OptimizerRule)

OF_MOMENTA: tuple[OptimizerRule, ...] = ("adam-momentum", "sgd-momentum")
"""Rules of optimizers that send momenta."""

SMALL = 4096
"""Elements below which tensors are judged together, by their mean error, each weighted by its elements. Their errors
vary most from step to step, and single ones that may not travel with their neighbours would cut buffers in pieces."""


# --- the measure ------------------------------------------------------------------------------------------------------


def error_of(method: Compressor, gradients: np.ndarray, feedback: Feedback, rule: OptimizerRule) -> float:
    """How far a compressor with its feedback takes the moments of an optimizer from their values; see the module.

    Args:
        method: at the shape of the tensor.
        gradients: of consecutive steps, float32 (steps, elements), at least one step and element, finite.

    Returns:
        0: nothing is lost. 0 also where all gradients are zero and stay so; where they do not, infinite, or 1 for
        ``adam-momentum``.

    Example:
        >>> from espresso_mpi.autotune.fidelity import error_of
        >>> from espresso_mpi.feedback import AUTO
        >>> gradients = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
        >>> error_of(espresso_mpi.compressors.get("fp16"), gradients, AUTO, "adam") < 0.01
        True
    """
    if rule in OF_MOMENTA:
        # What is not delivered grows with the steps, and a session watches three or five. Momenta change slowly, so
        # these steps there and back stand for WINDOW of them.
        there_and_back = np.pad(np.arange(len(gradients)), (0, max(0, WINDOW - len(gradients))), mode="reflect")
        return _undelivered(method, [gradients[step] for step in there_and_back], feedback, rule)
    pairs = zip(moments(passed_through(method, gradients, feedback), rule), moments(gradients, rule))
    return max(_relative(found, wanted) for found, wanted in pairs)


def expected_error(
    spec: str, shape: tuple[int, ...], gradients: np.ndarray, feedback: Feedback, rule: OptimizerRule
) -> float:
    """``error_of`` for a tensor of this shape, times ``DRIFT`` where the method works on matrices.

    Args:
        gradients: of the tensor or of a sample of it, as for ``error_of``.

    Returns:
        nan, if it cannot be measured: a method for matrices, and only a sample.
    """
    method = compressors.get(spec)
    shaped = method.shaped(shape)
    if shaped == method:
        return error_of(method, gradients, feedback, rule)
    whole = gradients.shape[1] == math.prod(shape)
    return DRIFT * error_of(shaped, gradients, feedback, rule) if whole else math.nan


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return _share(float(np.linalg.norm(found - wanted)), float(np.linalg.norm(wanted)))


def _share(lost: float, size: float) -> float:
    return lost / size if size else (math.inf if lost else 0.0)


def _undelivered(method: Compressor, momenta: Sequence[np.ndarray], feedback: Feedback, rule: OptimizerRule) -> float:
    """Which share of the movement along these momenta has not come out after them.

    ``sgd-momentum``: of the sum. ``adam-momentum``: of each element, at most 1: the mean over those that move. What
    comes out for others, such as the rows of rare tokens, is added as a share of the mean movement: the optimizers
    divide by a typical √v where v is zero.
    """
    passage, n = Passage(method, momenta[0].size, feedback), momenta[0].size
    lost, moved, added = np.zeros(n), np.zeros(n), np.abs if rule == "adam-momentum" else np.positive
    for momentum in momenta:
        lost += np.subtract(passage.of(momentum), momentum, dtype=np.float64)
        moved += added(momentum)
    if rule == "sgd-momentum":
        return _share(float(np.linalg.norm(lost)), float(np.linalg.norm(moved)))
    np.abs(lost, out=lost)
    moving = np.count_nonzero(moved)
    if not moving:
        return float(lost.any())
    moved[moved == 0] = moved.sum() / moving
    return float(np.minimum(lost / moved, 1.0).sum() / moving)


def moments(gradients: np.ndarray, rule: OptimizerRule) -> list[np.ndarray]:
    """What SGD or Adam makes of consecutive gradients, but for a factor: the momentum, and for ``adam`` also √v.

    Args:
        gradients: (steps, elements).

    Returns:
        Arrays of float64 (elements,).
    """
    first, second = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for row in gradients:
        g = row.astype(np.float64)
        first *= BETA_1
        first += g
        if rule == "adam":
            second *= BETA_2
            second += np.square(g, out=g)
    return [first, np.sqrt(second)] if rule == "adam" else [first]


def passed_through(method: Compressor, gradients: np.ndarray, feedback: Feedback) -> np.ndarray:
    """What one encode and decode makes of consecutive gradients, with error feedback: float32 (steps, elements)."""
    passage = Passage(method, gradients.shape[1], feedback)
    return np.array([passage.of(gradient) for gradient in gradients])


class Passage:
    """One encode and decode with its error feedback, step by step, of parameter schedules as they end.

    Args:
        method: at the shape of the tensor; n: elements.
    """

    def __init__(self, method: Compressor, n: int, feedback: Feedback) -> None:
        self._method, self._step, self._context = method.at(None), 0, Context()
        self._how = feedback.resolved(self._method, n)
        self._kept = np.zeros(n, np.float32)  # the residual, or what ef21 has sent so far
        room = np.empty(self._method.nbytes(n) + 15, np.uint8)
        begin = -room.ctypes.data % 16
        self._payload = room[begin : begin + self._method.nbytes(n)]

    def of(self, gradient: np.ndarray) -> np.ndarray:
        """What comes out for the gradient of the next step, float32 (elements,)."""
        context, method, out = self._context, self._method, np.empty_like(gradient)
        context.key = context.shared = context.step = self._step
        self._step += 1
        if self._how.kind == "ef21":
            method.encode(gradient - self._kept, self._payload, None, context)
            method.decode(self._payload, out, context)
            self._kept += out
            return self._kept.copy()
        self._kept *= np.float32(self._how.decay)
        method.encode(gradient, self._payload, None if self._how.kind == "none" else self._kept, context)
        method.decode(self._payload, out, context)
        return out


# --- the assessment ---------------------------------------------------------------------------------------------------


def _is_shaped(method: Compressor) -> bool:
    """Whether a method makes something of the shape of a tensor, so that a sample of it is not enough."""
    return type(method).shaped is not Compressor.shaped


@dataclass(frozen=True)
class Assessment:
    """Which tensors may not travel by which compressors.

    Attributes:
        barred: specs by the name of the tensor; dropped: the same in words, a line for each compressor.
    """

    barred: Mapping[str, tuple[str, ...]]
    dropped: tuple[str, ...] = ()

    def on(self, workload: Workload) -> Workload:
        """The workload with its tensors barred from these compressors."""
        tensors = (replace(tensor, barred=self.barred.get(tensor.name, ())) for tensor in workload.tensors)
        return replace(workload, tensors=tuple(tensors)) if self.barred else workload

    def left(self, specs: Sequence[str], workload: Workload) -> tuple[str, ...]:
        """The compressors that at least one tensor may travel by."""
        names = [tensor.name for tensor in workload.tensors]
        return tuple(text for text in specs if any(text not in self.barred.get(name, ()) for name in names))


class Fidelity:
    """Samples of gradients, and what was found out by them.

    Attributes:
        samples: of the steps that are watched; rule: of the optimizer that uses the means, None: not known.
        wanted: the compressors that have to be measured: not those that are always accurate, and none without a budget.
    """

    def __init__(self, tuning: Tuning, feedback: Feedback) -> None:
        self.accuracy, self.feedback, self.rule = tuning.accuracy, feedback, tuning.optimizer
        self.wanted = self._to_measure(tuning)
        self.samples = Samples(whole=any(_is_shaped(compressors.get(text)) for text in self.wanted))
        self._known: dict[tuple[str, int, str, OptimizerRule], float] = {}

    def _to_measure(self, tuning: Tuning) -> list[str]:
        limited = any(math.isfinite(budget) for budget in BUDGETS[self.accuracy].values())
        asked = [text for text in tuning.compressors if text.partition(":")[0] not in ALWAYS_ACCURATE]
        return asked if limited else []

    def take(self, gradients: Iterable[Gradient]) -> None:
        """Keep of these gradients, which are about to be synchronised, what an assessment needs."""
        if self.wanted:
            self.samples.take(gradients)

    def without_harm(
        self, transport: Transport, workload: Workload, tuning: Tuning
    ) -> tuple[Workload, Tuning, tuple[str, ...]]:
        """What to plan by. Collective.

        Returns:
            The workload, its tensors barred from the compressors that would harm them; the settings with the usual
            compressors for momenta, if these are what travels, and without those that would harm all tensors; and what
            was dropped, in words, which rank 0 also writes to the log.

        Raises:
            PlanError: on every rank: a compressor failed on one.
        """
        start, rule = time.process_time(), self.agreed_rule(transport)
        if rule in OF_MOMENTA and tuning.compressors == LIKE_FP32:
            tuning = replace(tuning, compressors=FOR_MOMENTA)
            self.wanted = self._to_measure(tuning)
        assessment = self.assessed(transport, workload, rule)
        if transport.rank == 0 and self.wanted:
            _LOG.info("%.2f s of processor time to judge compressors by gradients", time.process_time() - start)
            for line in assessment.dropped:
                _LOG.info("%s", line)
        left = assessment.left(tuning.compressors, workload)
        return assessment.on(workload), replace(tuning, compressors=left), assessment.dropped

    def known_rule(self, transport: Transport) -> OptimizerRule | None:
        """The rule that all ranks know of; None: a rank knows of none yet, or of another one. Collective."""
        here = -1 if self.rule is None else RULES.index(self.rule)
        every = floats(transport, float(here))
        return RULES[here] if every.min() == every.max() >= 0 else None

    def agreed_rule(self, transport: Transport) -> OptimizerRule:
        """The rule that all ranks know of, else ``adam``, which is the strictest. Collective."""
        return self.known_rule(transport) or "adam"

    def assessed(self, transport: Transport, workload: Workload, rule: OptimizerRule) -> Assessment:
        """Which compressors to leave out for which tensors. Collective; the same on every rank.

        What was measured once stays known when the session plans anew, and the samples are forgotten.

        Raises:
            PlanError: on every rank: a compressor failed on one.
        """
        if not self.wanted:
            return Assessment({})
        here = [(tensor.name, tensor.size, text) for text in self.wanted for tensor in workload.tensors]
        shapes = {tensor.name: tensor.shape or (tensor.size,) for tensor in workload.tensors}
        _, said = on_every_rank(
            transport,
            lambda: [self._measured(name, shapes[name], text, rule) for name, _, text in here],
            PlanError,
            say=lambda found: [None if math.isnan(error) else float(f"{error:.4g}") for error in found],
            wording=lambda failures: f"no plan could be made: {first_failure(failures)}",
        )
        self.samples.clear()
        for place, (name, size, text) in enumerate(here):
            errors = [row[place] for row in said if row[place] is not None]
            self._known[name, size, text, rule] = float(np.mean(errors)) if errors else math.nan
        return self._assessment(workload, rule)

    def _measured(self, name: str, shape: tuple[int, ...], text: str, rule: OptimizerRule) -> float:
        """The error of a compressor on a tensor of this rank; nan: it cannot be measured."""
        size = math.prod(shape)
        if (name, size, text, rule) in self._known:
            return self._known[name, size, text, rule]
        gradients = self.samples.of(name, size)
        if not gradients.size:
            return math.nan
        return min(expected_error(text, shape, gradients, self.feedback, rule), 1e9)

    def _assessment(self, workload: Workload, rule: OptimizerRule) -> Assessment:
        budget, barred, words = BUDGETS[self.accuracy][rule], dict[str, tuple[str, ...]](), list[str]()
        for text in self.wanted:
            errors = {t.name: self._known[t.name, t.size, text, rule] for t in workload.tensors}
            off = spoiled(errors, {tensor.name: tensor.size for tensor in workload.tensors}, budget)
            barred |= {name: (*barred.get(name, ()), text) for name in off}
            if off:
                words.append(_said(text, list(off.values()), len(errors), budget, self.accuracy, rule))
        return Assessment(barred, tuple(words))


def spoiled(errors: Mapping[str, float], sizes: Mapping[str, int], budget: float) -> dict[str, float]:
    """The tensors whose error is beyond a budget, or not known (nan); small ones have their common mean (``SMALL``).

    Example:
        >>> from espresso_mpi.autotune.fidelity import spoiled
        >>> spoiled({"w": 0.2, "a": 0.2, "b": 0.05}, {"w": 9000, "a": 10, "b": 90}, budget=0.1)
        {'w': 0.2}
    """
    small = {name: size for name, size in sizes.items() if size < SMALL}
    known = {name: size for name, size in small.items() if not math.isnan(errors[name])}
    mean = sum(errors[name] * size for name, size in known.items()) / sum(known.values()) if known else math.nan
    return {name: error for name, error in {**errors, **dict.fromkeys(small, mean)}.items() if not error <= budget}


def _said(text: str, errors: Sequence[float], tensors: int, budget: float, level: Accuracy, rule: OptimizerRule) -> str:
    known = [error for error in errors if not math.isnan(error)]
    spread = f"{min(known):.3g} to {max(known):.3g}" if len(known) > 1 else f"{known[0]:.3g}" if known else ""
    unknown = f"{len(errors) - len(known)} not measured" if len(known) < len(errors) else ""
    values = ", ".join(filter(None, (f"error {spread}" if known else "", unknown)))
    limit = f"accuracy={level!r} allows {budget:g} ({rule})"
    return f"{text} dropped for {len(errors)} of {tensors} tensors: {values}; {limit}"
