"""`espresso-mpi bench fidelity`: what ``plan="auto"`` measures of the first gradients, beside losses at the end.

Two ranks are simulated in one process: each compresses the gradients of its own batches with error feedback, and an
optimizer takes the mean. Every compressor trains all tensors of a small GPT and of an LSTM. Then, at each level of
``accuracy``, every tensor travels by the compressor with the fewest bytes that the level allows for it by the errors of
the first steps: the worst that a plan may do. See docs/auto.md.

Beside that error stand other measures of a step's progress, and how well each orders the compressors by the loss at the
end: the cosine between the mean gradient and what came out, and the loss after the first steps against that of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espresso_mpi import compressors as registry
from espresso_mpi.errors import ConfigError

from ..autotune.fidelity import BUDGETS, Passage, expected_error, spoiled
from ..autotune.samples import WINDOW
from ..feedback import AUTO
from ..tuning import ALWAYS_ACCURATE, Accuracy, OptimizerRule
from . import text
from .datasets import Characters
from .defaults import Fidelity as Defaults
from .gpt_shape import Shape
from .harness.columns import PERCENT_2, RATIO, Column, Table, Unit
from .harness.suite import Suite
from .model import learning_rate, to_bits

RANKS, BATCH, CONTEXT = 2, 4, 48
LSTM_WIDTH = 112

RATES = {("gpt", "adamw"): 2e-3, ("lstm", "adamw"): 6e-3, ("gpt", "sgd"): 0.02, ("lstm", "sgd"): 0.3}
"""Peak learning rates, by model and optimizer."""

_PARTS = 8
"""Of the validation text, one at a time."""

RULES: Mapping[str, OptimizerRule] = {"adamw": "adam", "sgd": "sgd"}

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """A run beside the one of the same seed that sends float32.

    Attributes:
        way: a compressor for all tensors, or a level of ``accuracy``.
        error: of the first steps, the mean over tensors, weighted by their elements; 0 without compression.
        aligned: cosine between the mean of the gradients and of what came out, the mean over the first steps.
        early, later: by which share of what fp32 gained the validation loss fell in the first ``WINDOW`` steps, and in
            the first fifth of all.
        bits: sent for an element.
        loss: bits per character at the end; gap: relative to that of float32.
    """

    model: str
    optimizer: str
    seed: int
    way: str
    error: float
    aligned: float
    early: float
    later: float
    bits: float
    loss: float
    gap: float


TABLE = Table(
    [
        Column("model", "model", left=True),
        Column("optimizer", "optimizer", left=True),
        Column("seed", "seed"),
        Column("way", "way", left=True),
        Column("error", "error", Unit("", 1, ".3f")),
        Column("cosine", "aligned", Unit("", 1, ".3f")),
        Column("progress, first steps", "early", Unit("", 1, ".3f")),
        Column("first fifth", "later", Unit("", 1, ".3f")),
        Column("bits", "bits", RATIO),
        Column("loss", "loss", Unit("", 1, ".4f")),
        Column("against fp32", "gap", PERCENT_2),
    ]
)


def main(
    *,
    compressors: str = Defaults.compressors,
    seeds: str = Defaults.seeds,
    steps: int = Defaults.steps,
    json: Path | None = None,
) -> list[Row]:
    """Train, print a table, and write JSON if asked.

    Args:
        compressors: comma list of specs.
        seeds: comma list of seeds of weights and batches.
        steps: training steps of each run, at least 8.
        json: file for the result.

    Raises:
        ConfigError: an argument does not fit.
        CorpusError: this Python has no training text.
    """
    run = Suite("fidelity", json=json)
    specs = [spec for spec in registry.read_specs(compressors) if spec != "none"]
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {seeds!r}; expected whole numbers with commas between them") from None
    if steps <= WINDOW:
        raise ConfigError(f"--steps {steps}; expected at least {WINDOW + 1}")
    cases = [(model, optimizer, seed) for model, optimizer in RATES for seed in numbers]
    rows: list[Row] = []
    with run.progress(len(cases) * (1 + len(specs) + len(BUDGETS))) as tick:
        for model, optimizer, seed in cases:
            rows += _Case(model, optimizer, seed, steps, tick).rows(specs)
    TABLE.show(f"bench fidelity: {RANKS} simulated ranks, {steps} steps", rows)
    print("\n".join(_correlations([row for row in rows if row.way in specs])))
    run.write(rows, ranks=RANKS, steps=steps)
    return rows


@dataclass(frozen=True)
class _Trained:
    """What is kept of a run.

    Attributes:
        loss: at the end, in bits per character.
        recorded: each rank's gradients of the first steps.
        aligned: as of ``Row``.
        gained: by how much the validation loss fell in the first ``WINDOW`` steps, and in the first fifth of all.
    """

    loss: float
    recorded: list[list[Gradients]]
    aligned: float
    gained: tuple[float, float]


def _correlations(rows: Sequence[Row]) -> list[str]:
    """How well each measure orders the runs of compressors by their losses against fp32, by optimizer."""
    measures = {
        "error": ("error", 1), "aligned": ("cosine", -1), "early": (f"progress in {WINDOW} steps", -1),
        "later": ("in a fifth", -1),
    }  # fmt: skip
    lines = []
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        own = [row for row in rows if row.optimizer == optimizer]
        gaps = np.array([row.gap for row in own])
        told = ", ".join(
            f"{name} {sign * rank_correlation(np.array([getattr(row, field) for row in own]), gaps):.2f}"
            for field, (name, sign) in measures.items()
        )
        lines.append(f"Rank correlation with the loss against fp32, {optimizer}, {len(own)} runs: {told}")
    return lines


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's coefficient; equal values share their mean rank. nan where all values of one are equal.

    Example:
        >>> import numpy as np
        >>> from espresso_mpi.bench.fidelity import rank_correlation
        >>> round(rank_correlation(np.array([1.0, 2.0, 2.0, 9.0]), np.array([0.1, 0.3, 0.2, 0.4])), 3)
        0.949
    """
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return mean


class _Case:
    """A model and an optimizer from one seed."""

    def __init__(self, model: str, optimizer: str, seed: int, steps: int, tick: Callable[[], None]) -> None:
        self._model, self._optimizer, self._seed, self._steps, self._tick = model, optimizer, seed, steps, tick
        self._data = Characters(text.load(), CONTEXT)

    def rows(self, specs: Sequence[str]) -> list[Row]:
        """Of every compressor for all tensors, and of every level."""
        base = self.trained({})
        recorded = base.recorded
        shapes = {name: value.shape for name, value in recorded[0][0].items()}
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        rule, total = RULES[self._optimizer], sum(sizes.values())
        errors = {spec: {name: _error(spec, name, recorded, rule) for name in shapes} for spec in specs}
        ways = {spec: dict.fromkeys(shapes, spec) for spec in specs}
        for level in BUDGETS:
            ways[level] = _smallest(shapes, sizes, errors, level, rule)
        found = []
        for way, chosen in ways.items():
            run = self.trained(chosen)
            error = sum(errors[spec][name] * sizes[name] for name, spec in chosen.items()) / total
            bits = 8 * sum(_method(spec, shapes[name]).nbytes(sizes[name]) for name, spec in chosen.items()) / total
            early, later = (gain / of_fp32 for gain, of_fp32 in zip(run.gained, base.gained))
            found.append(
                Row(
                    self._model, self._optimizer, self._seed, way, error, run.aligned, early, later, bits, run.loss,
                    run.loss / base.loss - 1,
                )
            )  # fmt: skip
        return found

    def trained(self, chosen: Mapping[str, str]) -> _Trained:
        """The run in which tensors travel by these compressors."""
        from .replica import Replica

        replica, rate = Replica(self._network(), self._optimizer, 0.9, 1), RATES[self._model, self._optimizer]
        batches = [self._data.batches(RANKS, rank, self._seed, BATCH) for rank in range(RANKS)]
        shapes = {name: tuple(weights.shape) for name, weights in replica.model.named_parameters()}
        ways = [
            {
                name: Passage(_method(spec, shapes[name]), int(np.prod(shapes[name])), AUTO)
                for name, spec in chosen.items()
            }
            for _ in range(RANKS)
        ]
        recorded, cosines, losses = [], [], {}
        for step in range(self._steps):
            if step in (0, WINDOW, self._steps // 5):
                losses[step] = self._loss(replica, 1)
            ranks: list[Gradients] = []
            for batch in batches:
                own = replica.gradients(*batch())
                ranks.append({name: value.numpy().copy() for name, value in own.items()})
            if step < WINDOW:
                recorded.append(ranks)
            pairs = []
            for name, target in own.items():
                values = [ranks[rank][name].ravel() for rank in range(RANKS)]
                sent = [way[name].of(value) if name in way else value for way, value in zip(ways, values)]
                mean = np.mean(sent, axis=0)
                if step < WINDOW:
                    pairs.append((np.mean(values, axis=0), mean))
                target.numpy()[...] = mean.reshape(shapes[name])
            if pairs:
                cosines.append(_cosine(pairs))
            replica.update(learning_rate(step, self._steps, rate))
        loss = to_bits(self._loss(replica, _PARTS))
        self._tick()
        gained = losses[0] - losses[WINDOW], losses[0] - losses[self._steps // 5]
        return _Trained(loss, recorded, float(np.mean(cosines)), gained)

    def _loss(self, replica: Any, parts: int) -> float:
        """The validation loss in nats, by so many of ``_PARTS`` equal parts of the windows."""
        places = [self._data.places[start::_PARTS] for start in range(parts)]
        return float(np.mean([replica.loss(*self._data.validation(part)) for part in places]))

    def _network(self) -> Any:
        from .gpt import GPT
        from .networks import CharLSTM

        if self._model == "gpt":
            return GPT(Shape(context=CONTEXT, width=96, layers=2, heads=4), self._seed)
        return CharLSTM(text.ALPHABET, LSTM_WIDTH, 1, self._seed)


def _cosine(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Between the first ones, all tensors together, and the second ones."""
    product, first, second = (
        sum(float(np.dot(pair[i].astype(np.float64), pair[j])) for pair in pairs) for i, j in ((0, 1), (0, 0), (1, 1))
    )
    return product / math.sqrt(first * second) if second else 0.0


def _method(spec: str, shape: tuple[int, ...]) -> registry.Compressor:
    return registry.get(spec).at(None).shaped(shape)


def _error(spec: str, name: str, recorded: Sequence[Sequence[Gradients]], rule: OptimizerRule) -> float:
    """The mean over the ranks, as a session measures it."""
    errors = []
    for rank in range(RANKS):
        steps = np.array([step[rank][name].ravel() for step in recorded])
        errors.append(expected_error(spec, recorded[0][rank][name].shape, steps, AUTO, rule))
    return float(np.mean(errors))


def _smallest(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], errors: Mapping[str, Mapping[str, float]],
    level: Accuracy, rule: OptimizerRule,
) -> dict[str, str]:  # fmt: skip
    """For every tensor the compressor with the fewest bytes that a level allows."""
    budget = BUDGETS[level][rule]
    barred = {
        spec: set[str]() if spec.partition(":")[0] in ALWAYS_ACCURATE else set(spoiled(found, sizes, budget))
        for spec, found in errors.items()
    }
    allowed = {name: [spec for spec in errors if name not in barred[spec]] for name in shapes}
    return {
        name: min(own, key=lambda spec: _method(spec, shapes[name]).nbytes(sizes[name]))
        for name, own in allowed.items()
        if own
    }
