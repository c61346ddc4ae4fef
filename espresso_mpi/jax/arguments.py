"""What the transformations for optax are given: checked, and as numbers of a step. May import: JAX, optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp

from ..default import default_session
from ..errors import ConfigError
from ..optim.messages import check_session
from ..optim.settings import MOST, count, number
from ..session import Session
from ..tuning import OptimizerRule

_LAST = 2**31 - 1
"""The largest number of an int32, in which JAX counts steps."""


def optax_for(owner: str, instead: str) -> Any:
    """The module optax.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optax
    except ImportError as error:
        raise ConfigError(f"{owner}: optax is missing; pip install optax, or {instead}") from error
    return optax


def usable(owner: str, session: Session | None, rule: OptimizerRule | None = "adam-momentum") -> Session:
    """The session, or the default one.

    Args:
        rule: what it judges compressors for, if it plans for itself.

    Raises:
        ConfigError: it would skip values that are not finite.
    """
    chosen = session if session is not None else default_session()
    check_session(owner, chosen, rule)
    return chosen


def steps(owner: str, key: str, value: Any, least: int) -> int:
    """A checked number of steps, no larger than an int32.

    Raises:
        ConfigError: it is no whole number, or it is below ``least``.
    """
    return min(count(owner, key, value, least), _LAST)


def schedule(owner: str, learning_rate: Any) -> Callable[[Any], Any]:
    """The learning rate as a function of the number of updates so far.

    Args:
        learning_rate: a number, or a schedule of optax, which is such a function.

    Raises:
        ConfigError: it is neither, or the number is out of its range.
    """
    if callable(learning_rate):
        given: Callable[[Any], Any] = learning_rate
        return lambda updates: jnp.asarray(given(updates), jnp.float32)
    if isinstance(learning_rate, jax.core.Tracer) and not learning_rate.shape:  # of optax.inject_hyperparams
        return lambda updates: learning_rate.astype(jnp.float32)
    scalar = isinstance(learning_rate, jax.Array) and not learning_rate.shape
    value = number(owner, "learning_rate", float(learning_rate) if scalar else learning_rate, 0, MOST)
    return lambda updates: value


def given_params(owner: str, params: Any) -> Any:
    """The parameters.

    Raises:
        ConfigError: the update was called without them.
    """
    if params is None:
        raise ConfigError(
            f"{owner}: update got no params; expected the parameters; call optimizer.update(grads, state, params)"
        )
    return params


def decays(owner: str, weight_decay: float, mask: Any, params: Any) -> Any:
    """λ of each parameter: zero where the mask says so.

    Args:
        mask: a tree of booleans, a function that makes it of the parameters, or None.

    Raises:
        ConfigError: the mask has another structure than the parameters.
    """
    if mask is None:
        return jax.tree_util.tree_map(lambda _: weight_decay, params)
    try:
        chosen = mask(params) if callable(mask) else mask
        return jax.tree_util.tree_map(lambda _, keep: weight_decay * keep, params, chosen)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{owner}: mask does not fit the parameters ({error}); expected a tree of their structure with True where "
            f"weight decay applies, or a function of the parameters that returns one"
        ) from None


def unbiased(beta: float, averaged: Any) -> Any:
    """1/(1 - βᵗ), which corrects the mean of t values for its bias; expm1 keeps the digits that 1 - βᵗ loses."""
    return -1 / jnp.expm1(averaged * math.log(beta)) if beta else 1.0
