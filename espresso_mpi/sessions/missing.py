"""Tensors that some ranks do not have: zeros in their place, for ``sync(missing="zero")``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import buffers
from .collectives import Collectives

_NAME = "sync(missing='zero')"


def with_zeros(session: Collectives, grads: Any) -> Any:
    """``grads``, in new containers with zeros for what is None here and not on all ranks. Collective.

    Raises:
        MismatchError: on every rank: the ranks have different numbers of tensors.
    """
    values = [value for _, value in buffers.flatten(grads)]
    here = np.array([value is not None for value in values], bool)
    seen = session.allreduce(np.concatenate([here, ~here]), op="max", name=_NAME)
    partly = np.flatnonzero(seen[: here.size] & seen[here.size :])
    if not partly.size:
        return grads
    forms = _forms(session, {int(k): _form(values[k]) for k in partly if here[k]})
    like = next((value for value in values if value is not None), None)
    filled = {k: _zeros(*forms[k], like) for k in map(int, partly) if not here[k] and k in forms}
    return buffers.replaced(grads, iter([filled.get(k, value) for k, value in enumerate(values)]))


def _form(value: Any) -> tuple[list[int], str]:
    """Shape and element type of an array of any library."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return list(getattr(value, "shape", ())), dtype


def _forms(session: Collectives, mine: Mapping[int, tuple[list[int], str]]) -> dict[int, tuple[list[int], str]]:
    """What the ranks know of tensors that some do not have, by position."""
    text = json.dumps(list(mine.items())).encode()
    longest = session.allreduce(np.array([len(text)]), op="max", name=_NAME)
    said = session.allgather(np.frombuffer(text.ljust(int(longest[0])), np.uint8).copy(), name=_NAME)
    return {k: form for one in said.reshape(-1, int(longest[0])) for k, form in json.loads(one.tobytes())}


def _zeros(shape: list[int], dtype: str, like: Any) -> Any:
    """Zeros of the library and on the device of another array; of numpy where there is none."""
    if hasattr(like, "new_zeros"):  # torch
        return like.new_zeros(shape, dtype=getattr(sys.modules["torch"], dtype))
    if hasattr(like, "__cuda_array_interface__"):
        return sys.modules[type(like).__module__.split(".")[0]].zeros(shape, dtype)
    return np.zeros(shape, dtype)
