"""Changes the unit of gradients in the state of a session, as a loss scaler requires."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives.data import reduction
from ..collectives.messages.agreement import floats, on_every_rank
from ..collectives.messages.transport import Transport
from ..collectives.store_keys import OWN, Key
from ..compressors import LIMIT
from ..errors import ConfigError, StateError
from ..options import Options
from .resharding import reshard_rules
from .store import StateStore

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Factors that a float32 holds with all its digits: the state is multiplied in float32."""


def checked_factor(factor: Any) -> float:
    """A factor as a float.

    Raises:
        ConfigError: not a number above 0 in the range of float32.
    """
    good = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
    try:
        good = good and _LEAST <= float(factor) <= _MOST
    except OverflowError:  # a whole number beyond all floats
        good = False
    if not good:
        raise ConfigError(
            f"rescale: factor={factor!r}; expected a number from {_LEAST:.3g} to {_MOST:.3g}, the range of float32: "
            f"the new loss scale divided by the old"
        )
    return float(factor)


def is_one(factor: Any) -> bool:
    """Whether a factor changes nothing; it may be invalid."""
    try:
        return checked_factor(factor) == 1
    except ConfigError:
        return False


def _largest(store: StateStore) -> float:
    """The largest magnitude in the state of this rank."""
    largest = 0.0
    for value in store.values():
        here = np.empty(value.size, np.float32)
        device.copy(here, value)
        largest = max(largest, float(np.abs(here).max(initial=0.0)))
    return largest


def rescale(transport: Transport, options: Options, store: StateStore, given: Any) -> None:
    """Multiply residuals, and all other state that has the unit of gradients, by a factor. Collective.

    A compressor's own array is multiplied if it is a mean of gradients (``Compressor.keeps``). Low-rank factors and
    counters have no unit.

    Raises:
        ConfigError: on every rank: a factor is none, the ranks have different ones, or values would leave their range;
            StateError: a compressor does not declare its own arrays. Nothing was changed.
    """
    factor, _ = on_every_rank(transport, lambda: checked_factor(given), ConfigError)
    _require_alike(transport, factor, _largest(store))
    found, _ = on_every_rank(transport, lambda: _with_unit(options, store), StateError)  # ranks keep different things
    for text in found:
        reduction.blend(store[text], factor, 0.0, store[text])


def _require_alike(transport: Transport, factor: float, largest: float) -> None:
    """Require one factor on all ranks, and that the largest value of any rank stays in its range. Collective."""
    said = floats(transport, factor, largest)
    if said[:, 0].min() != said[:, 0].max():
        given = ", ".join(f"{transport.describe(rank)} has {value:g}" for rank, value in enumerate(said[:, 0]))
        raise ConfigError(f"rescale: the ranks have different factors: {given}; pass the same")
    if said[:, 1].max() * factor > LIMIT:
        raise ConfigError(
            f"rescale: factor={factor:g} would take the state, up to {said[:, 1].max():g}, beyond {LIMIT:g}, the "
            f"most that a residual may be; the loss scale is too large"
        )


def _with_unit(options: Options, store: StateStore) -> list[str]:
    """The keys of the arrays that have the unit of gradients.

    Raises:
        StateError: a compressor does not declare its own arrays.
    """
    known = reshard_rules(options)
    keys = {text: Key.parse(text).what for text in store}
    own = {text: known.get(what.removeprefix(OWN)) for text, what in keys.items() if what.startswith(OWN)}
    unknown = [text for text, rule in own.items() if rule is None]
    if unknown:
        raise StateError(f"rescale: {unknown[0]!r}: its compressor does not say what it is; name it in ``keeps``")
    return [text for text in keys if own.get(text, "average") == "average"]
