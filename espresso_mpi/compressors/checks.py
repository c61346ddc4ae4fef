"""Checks of arrays and of parameters; their errors say what was got and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.device import device_of
from ..errors import ConfigError, PayloadError
from .schedule import ParameterSchedule


def check_array(what: str, array: Any, dtype: Any, size: int, where: str) -> None:
    """Raise PayloadError unless ``array`` is flat and contiguous, of ``size`` elements, on the device ``where``."""
    got, expected = (array.dtype, array.ndim, array.size, device_of(array)), (np.dtype(dtype), 1, size, where)
    if got != expected:
        raise PayloadError(
            f"{what}: got {got[0]} with {got[1]} dimension(s), {got[2]} elements on {got[3]}; expected "
            f"{expected[0]} with 1 dimension, {size} elements on {where}; pass a flat array of that size"
        )
    contiguous = array.flags["C_CONTIGUOUS"] if where == "cpu" else array.is_c_contiguous()
    if not contiguous:
        raise PayloadError(
            f"{what}: got a strided array; expected contiguous memory; pass numpy.ascontiguousarray(...)"
        )


def check_positive_int(owner: str, name: str, value: Any, low: int = 1, high: int = 1 << 30) -> None:
    """Raise ConfigError unless ``value``, at both ends of a ParameterSchedule, is an int in [low, high]."""
    for v in (value.start, value.end) if isinstance(value, ParameterSchedule) else (value,):
        if isinstance(v, bool) or not isinstance(v, int) or not low <= v <= high:
            raise ConfigError(f"{owner}: {name}={value}; expected a whole number from {low} to {high}")


def check_power_of_two(owner: str, name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless ``value``, at both ends of a ParameterSchedule, is a power of two in [low, high]."""
    check_positive_int(owner, name, value, low, high)
    for v in (value.start, value.end) if isinstance(value, ParameterSchedule) else (value,):
        if int(v).bit_count() != 1:
            raise ConfigError(f"{owner}: {name}={value}; expected a power of two from {low} to {high}")


def check_number(owner: str, name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """Raise ConfigError unless ``value``, at both ends of a ParameterSchedule, is in [low, high]; or ``above`` low."""
    for v in (value.start, value.end) if isinstance(value, ParameterSchedule) else (value,):
        number = isinstance(v, (int, float)) and not isinstance(v, bool)
        if not number or not low <= v <= high or (above and v == low):
            raise ConfigError(
                f"{owner}: {name}={value}; expected a number {'above' if above else 'from'} {low:g} to {high:g}"
            )


def check_choice(owner: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{owner}: {name}={value!r}; expected one of {', '.join(allowed)}")
