"""Tensors that some ranks do not have: zeros in their place, for ``sync(missing="zero")``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import buffers
from ..arrays.buffers import Gradient
from ..engine.calls import Exchange
from ..types import ITEMSIZE
from .collectives import Collectives, reduction_by_mpi
from .exchanges import Taken

_NAME = "sync(missing='zero')"


def with_zeros(session: Collectives, grads: Any) -> Any:
    """``grads``, in new containers with zeros for what is None here and not on all ranks. Collective.

    What is no array stays, for ``sync`` to refuse it on every rank.

    Raises:
        GradientError: on every rank: the containers of one cannot be read.
        MismatchError: on every rank: the ranks have different numbers of tensors.
    """
    seen = _seen(session, grads)
    have, lack = np.split(seen, 2)
    partly = [int(k) for k in np.flatnonzero(have & lack)]
    if not partly:
        return grads
    values = [value for _, value in buffers.flatten(grads)]
    forms = _forms(session, {k: _form(values[k]) for k in partly if values[k] is not None})
    like = next((value for value in values if value is not None), None)
    filled = {k: _zeros(*forms[k], like) for k in partly if values[k] is None and k in forms}
    return buffers.replaced(grads, iter([filled.get(k, value) for k, value in enumerate(values)]))


def _seen(session: Collectives, grads: Any) -> Any:
    """By position, whether any rank has the tensor; then, whether any rank has None. Collective."""

    def take() -> Taken:
        here = np.array([value is not None for _, value in buffers.flatten(grads)], bool)
        seen = np.concatenate([here, ~here])
        return {"x": seen}, seen

    def make(gradients: Sequence[Gradient]) -> Exchange:
        return reduction_by_mpi(session, "allreduce", gradients[0], "max")

    return session._collective("allreduce", _NAME, take, make, True)


def _form(value: Any) -> tuple[list[int], str]:
    """Shape and element type of an array of any library."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return list(getattr(value, "shape", ())), dtype


def _forms(session: Collectives, mine: Mapping[int, tuple[list[int], str]]) -> dict[int, tuple[list[int], str]]:
    """What the ranks know of tensors that some do not have, by position."""
    known = [(k, form) for k, form in mine.items() if form[1] in ITEMSIZE]
    text = json.dumps(known).encode()
    longest = session.allreduce(np.array([len(text)]), op="max", name=_NAME)
    said = session.allgather(np.frombuffer(text.ljust(int(longest[0])), np.uint8).copy(), name=_NAME)
    return {k: form for one in said.reshape(-1, int(longest[0])) for k, form in json.loads(one.tobytes())}


def _zeros(shape: list[int], dtype: str, like: Any) -> Any:
    """Zeros of the library and on the device of another array; of numpy where there is none."""
    if hasattr(like, "new_zeros"):  # torch
        return like.new_zeros(shape, dtype=getattr(sys.modules["torch"], dtype))
    if hasattr(like, "__cuda_array_interface__"):
        return sys.modules[type(like).__module__.split(".")[0]].zeros(shape, dtype)
    try:
        return np.zeros(shape, dtype)
    except TypeError:  # bfloat16, which numpy alone does not know
        return None
