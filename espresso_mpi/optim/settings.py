"""Checks of the numbers that optimizers are given."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

LEAST_EPS, MOST = 1e-30, 1e30


def lies(value: Any, low: float, high: float) -> bool:
    """Whether a value is a real number of that range, both ends included."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and low <= float(value) <= high


def number(owner: str, key: str, value: Any, low: float, high: float) -> float:
    """The value as a float.

    Raises:
        ConfigError: it is not a number from ``low`` to ``high``.
    """
    if not lies(value, low, high):
        raise ConfigError(f"{owner}: {key}={value!r}; expected a number from {low:g} to {high:g}")
    return float(value)


def count(owner: str, key: str, value: Any, least: int) -> int:
    """The value, a whole number.

    Raises:
        ConfigError: it is not, or it is below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{owner}: {key}={value!r}; expected a whole number from {least} on")
    return int(value)


def update_clip_of(owner: str, value: Any) -> float:
    """The largest element of a direction; None: none is too large.

    Raises:
        ConfigError: it is neither None nor a number above zero.
    """
    if value is None:
        return MOST  # formulas multiply it, so it is not infinite
    if not lies(value, LEAST_EPS, MOST):
        raise ConfigError(f"{owner}: update_clip={value!r}; expected a number above 0, such as 1, or None for no limit")
    return float(value)


@dataclass(frozen=True)
class AdamSettings:
    """The hyperparameters of one parameter in one step of Adam.

    Attributes:
        lr: η, the learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ, decoupled as in AdamW.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def checked(cls, owner: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> AdamSettings:
        """Checked settings; ``owner`` names the optimizer in errors.

        Raises:
            ConfigError: a number is out of its range.
        """
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(lies(b, 0, 1) and b < 1 for b in betas):
            raise ConfigError(f"{owner}: betas={betas!r}; expected two numbers from 0 to below 1")
        if not lies(eps, LEAST_EPS, 1):
            raise ConfigError(
                f"{owner}: eps={eps!r}; expected a number from {LEAST_EPS:g} (float32 knows no less) to 1"
            )
        return cls(
            number(owner, "lr", lr, 0, MOST),
            (float(betas[0]), float(betas[1])),
            float(eps),
            number(owner, "weight_decay", weight_decay, 0, MOST),
        )


@dataclass(frozen=True)
class DeMoSettings:
    """The hyperparameters of one parameter in one step of DeMo.

    Attributes:
        lr: η, the learning rate.
        weight_decay: λ, decoupled.
        sign: whether the step is along the sign of what the ranks extract.
    """

    lr: float
    weight_decay: float
    sign: bool

    @classmethod
    def checked(cls, owner: str, lr: Any, weight_decay: Any, sign: Any) -> DeMoSettings:
        """Checked settings; ``owner`` names the optimizer in errors.

        Raises:
            ConfigError: a value is out of its range.
        """
        if not isinstance(sign, bool):
            raise ConfigError(f"{owner}: sign={sign!r}; expected True or False")
        return cls(number(owner, "lr", lr, 0, MOST), number(owner, "weight_decay", weight_decay, 0, MOST), sign)


@dataclass(frozen=True)
class SGDSettings:
    """The hyperparameters of one parameter in one step of SGD with momentum.

    Attributes:
        lr: η, the learning rate.
        momentum: μ.
        weight_decay: λ, of an L2 penalty as in torch's SGD.
        nesterov: whether the step is Nesterov's.
    """

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool

    @classmethod
    def checked(cls, owner: str, lr: Any, momentum: Any, weight_decay: Any, nesterov: Any) -> SGDSettings:
        """Checked settings; ``owner`` names the optimizer in errors.

        Raises:
            ConfigError: a value is out of its range.
        """
        if not lies(momentum, 0, 1) or momentum == 1:
            raise ConfigError(f"{owner}: momentum={momentum!r}; expected a number from 0 to below 1")
        if not isinstance(nesterov, bool):
            raise ConfigError(f"{owner}: nesterov={nesterov!r}; expected True or False")
        return cls(
            number(owner, "lr", lr, 0, MOST), float(momentum), number(owner, "weight_decay", weight_decay, 0, MOST),
            nesterov,
        )  # fmt: skip
