"""GPU arrays through host memory, for what a method has no GPU kernels for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import device
from .context import Context


def through_the_host(method: Any, name: str, inputs: Sequence[Any], outputs: Sequence[Any], context: Context) -> None:
    """Run a CPU method on copies of GPU arrays, and copy its outputs back.

    Args:
        method: takes an input, the other inputs and outputs, and the context.
        name: of the compressor, for the warning in the log.
        outputs: what the method writes; those that are None are passed as None.
    """
    _warn_host(name)
    there = [*inputs, *outputs]
    here = [None if a is None else device.to_host(a) for a in there]
    for key in list(context.state):
        context.kept(key, context.state[key].size, np.empty(0, np.float32))  # moves it to the host
    summary = None if context.summary is None else device.to_host(context.summary)
    x, *rest = here
    method(x, *rest, replace(context, summary=summary))
    for target, source in zip(outputs, here[len(inputs) :]):
        if target is not None:
            device.copy(target, source)


@lru_cache
def _warn_host(name: str) -> None:
    logging.getLogger("espresso_mpi").warning("%s has no GPU kernels: GPU tensors are compressed on the host", name)
