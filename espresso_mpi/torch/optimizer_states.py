"""Copies and saved states of optimizers, as far as torch does not make or check them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

S = TypeVar("S", bound=torch.optim.Optimizer)


def copied(optimizer: S, known: dict[int, Any], own: Iterable[str]) -> S:
    """A deep copy by the same session, which goes on in the place of this one: both would share the residuals.

    Args:
        known: what ``copy.deepcopy`` gave.
        own: names of the attributes that torch, which copies only its own, leaves out.
    """
    made = object.__new__(type(optimizer))
    known[id(optimizer)] = made
    attributes = {name: getattr(optimizer, name) for name in own}
    made.__setstate__(copy.deepcopy({**torch.optim.Optimizer.__getstate__(optimizer), **attributes}, known))
    return made


def saved_entries(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """The parameters with what a state has for each, in host memory: torch gives it to those of the same place."""
    saved = state.get("state", {})
    places = [place for group in state.get("param_groups", ()) for place in group["params"]]
    for place, parameter in zip(places, (p for group in optimizer.param_groups for p in group["params"])):
        if place in saved:
            yield parameter, on_the_host(saved[place])


def on_the_host(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The same with tensors in host memory."""
    return {key: value.cpu() if torch.is_tensor(value) else value for key, value in entry.items()}
