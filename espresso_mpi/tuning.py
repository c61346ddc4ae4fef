"""The settings of ``plan="auto"``."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal, get_args

from . import compressors
from .errors import ConfigError

LIKE_FP32 = ("fp16", "bf16", "int8", "int4")
"""The default compressors of plans: a GPT of 3 million parameters trained by them as with fp32 (``bench optimizers``).

Validation loss after 200 steps under AdamW against fp32: ``fp16``, ``bf16`` 0.0 %, ``int8`` -0.1 to 0.0 % and ``int4``
-0.1 to +0.9 % over two seeds, with feedback; under momentum SGD 0.0 % for all. ``bf16`` holds every magnitude of a
float32. Left out are ``powersgd:rank=4`` (+2.3 % under AdamW), ``onebit`` (+16 %) and ``topk`` at 1 % (+30 %).
"""


FOR_MOMENTA = (*LIKE_FP32, "int2", "onebit")
"""The same where messages are momenta: 1-bit Adam in two bits ended 1.5 % below AdamW in fp32 (GPT) and 0.4 % above it
(LSTM), in one bit 2.4 % below it and 1.1 % above it.
"""


Accuracy = Literal["safe", "balanced", "fast"]
OptimizerRule = Literal["adam", "sgd", "adam-momentum", "sgd-momentum"]

ALWAYS_ACCURATE = ("fp16", "bf16", "int8")
"""Compressors that no ``accuracy`` leaves out: they trained like fp32 wherever they were measured."""

_LEAST_BUDGET, _BUDGET_STEPS = 5.0, 30
"""What planning may cost: seconds, or steps of the quickest plan, whichever takes longer."""

_MEASURING = 0.25
"""The share of the budget that may be spent on measuring the cluster."""


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e9


def _path(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"tuning: plan_file={value!r}; expected the name of a file, or None")
    return text


@dataclass(frozen=True)
class Tuning:
    """How a session plans for itself.

    Attributes:
        compressors: specs of the compressors that a plan may use, with error feedback. The default compressors train
            like uncompressed gradients under AdamW, see ``LIKE_FP32``; name others explicitly. Where an optimizer of
            this package sends momenta, the default has ``int2`` and ``onebit``, too.
        skip: number of first steps that are not timed, because they compile and allocate.
        steps: number of steps that are timed before the session makes a plan. It is 3 if these take a quarter of
            ``budget``, which is 1.25 s by default. They are dense, or travel by ``int8`` on slow
            networks, momenta by ``int4``.
        seconds: approximate maximum time of the measurements. They take at most a quarter of the budget.
        trial_steps: maximum number of training steps in which plans are tried.
        budget: the seconds that planning may cost: the measurements, and the time by which the steps of the trials take
            longer than as many steps of the quickest plan. When they are spent, the session follows the quickest plan.
            None stands for the time of 30 steps of that plan, and at least 5 s.
        share: the part of the training time so far that trials may cost, above 0 and at most 1. When it is spent, they
            pause: the session follows the quickest plan so far until enough time has passed. With 1, they never do.
        check: number of steps between comparisons of measured and predicted step times.
        factor: the ratio of these times, in either direction, from which the session measures and plans again.
        every: minimum number of steps from one plan to the next, unless the first one is that of ``plan_file``.
        accuracy: how much a compressor may change a tensor's moments: ``safe``, ``balanced``, or ``fast`` (no limit).
        optimizer: whose moments count: ``adam``, ``sgd``; ``adam-momentum`` or ``sgd-momentum`` if the messages are
            momenta, with or without a division by √v; or None for what the optimizers of this package and an adapter
            for torch say, else ``adam``.
        plan_file: a file for the plan. Rank 0 writes it when the session has chosen a plan, and before that the
            quickest so far. A session of a later run follows it from the first step on, if ranks, tensors and settings
            are the same, and goes on with trials that have not ended. None: no file.

    Raises:
        ConfigError: a value is not in its range.

    Example:
        >>> tuning = espresso_mpi.Tuning(compressors=["fp16", "int8"], steps=12)
        >>> session = espresso_mpi.Session(plan="auto", tuning=tuning)
        >>> session.close()
    """

    compressors: tuple[str, ...] = LIKE_FP32
    skip: int = 2
    steps: int = 5
    seconds: float = 4.0
    trial_steps: int = 80
    budget: float | None = None
    share: float = 0.03
    check: int = 50
    factor: float = 1.5
    every: int = 500
    accuracy: Accuracy = "safe"
    optimizer: OptimizerRule | None = None
    plan_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.compressors, str):
            raise ConfigError(f"tuning: compressors={self.compressors!r}; expected a list such as ['fp16', 'int8']")
        specs = tuple(dict.fromkeys(str(compressors.get(text)) for text in self.compressors if text != "none"))
        object.__setattr__(self, "compressors", specs)
        votes = [text for text in specs if not compressors.get(text).averages]
        if votes:
            raise ConfigError(
                f"tuning: {', '.join(votes)}: the result is no mean, so a plan may not choose between it and dense "
                f"tensors; pass compressor={votes[0]!r} for all tensors instead"
            )
        for name, known in (("accuracy", get_args(Accuracy)), ("optimizer", (*get_args(OptimizerRule), None))):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"tuning: {name}={value!r}; expected {' or '.join(map(repr, known))}")
        for name, least in (("skip", 0), ("steps", 3), ("trial_steps", 1), ("check", 1), ("every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"tuning: {name}={value!r}; expected a whole number from {least} on")
        for name, above in (("seconds", 0.0), ("factor", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not above < value < 1e9:
                raise ConfigError(f"tuning: {name}={value!r}; expected a number above {above:g}")
        if self.budget is not None and (isinstance(self.budget, bool) or not _is_positive(self.budget)):
            raise ConfigError(f"tuning: budget={self.budget!r}; expected seconds above 0, or None")
        if self.plan_file is not None:
            object.__setattr__(self, "plan_file", _path(self.plan_file))
        if isinstance(self.share, bool) or not _is_positive(self.share) or self.share > 1:
            raise ConfigError(f"tuning: share={self.share!r}; expected a number above 0, up to 1")

    def budget_for(self, step: float) -> float:
        """The seconds that planning may cost if a step of the quickest plan takes ``step`` seconds.

        Example:
            >>> espresso_mpi.Tuning().budget_for(0.7)
            21.0
        """
        return max(_LEAST_BUDGET, _BUDGET_STEPS * step) if self.budget is None else float(self.budget)

    def measuring_for(self, step: float) -> float:
        """The seconds that measurements may take if a step of the quickest plan takes ``step`` seconds.

        Example:
            >>> espresso_mpi.Tuning().measuring_for(0.1)
            1.25
        """
        return min(self.seconds, _MEASURING * self.budget_for(step))

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The specs of compressors that are not known to train like uncompressed gradients under AdamW."""
        return tuple(text for text in self.compressors if text.partition(":")[0] not in LIKE_FP32)

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
