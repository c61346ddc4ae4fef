"""Optimizers for compressed messages. Their arrays are of any framework: numpy, CuPy, torch, JAX.

- ``clan``: takes gradients that are synchronised already.
- ``onebit_adam``, ``onebit_lamb``, ``zero_one_adam``, ``momentum_sgd``: synchronise momenta instead of gradients.
- ``demo``: synchronises the largest frequencies of each rank's own momentum.
- ``diloco``: synchronises the progress of many local steps.
- ``late``: parameters that join in a warm-up.
- ``rules``: the common part of the optimizers that synchronise momenta. ``espresso_mpi.torch`` and ``espresso_mpi.jax``
  use the same rules and formulas.
- ``warmup_trials``: how the gradients of a warm-up travel if the session plans for itself.
- ``zero_variance``: steps of parameters that had no gradient when their variance was frozen.
- ``formulas``: of all optimizers, each written once.
- ``updates``: applies them by fused kernels.
- ``cuda_updates``: the kernels for a GPU.
- ``tensors``: sees parameters as flat arrays.
- ``settings``, ``messages``, ``saved``: check numbers, sessions and saved states.

May import: ``session`` for its type, ``compressors.kernels``, ``arrays`` and the layers below them. To add an optimizer
that sends momenta, write a rule, a class over it, and a class in ``espresso_mpi.torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Clan": "clan",
    "DeMo": "demo",
    "DiLoCo": "diloco",
    "MomentumSGD": "momentum_sgd",
    "OnebitAdam": "onebit_adam",
    "OnebitLamb": "onebit_lamb",
    "ZeroOneAdam": "zero_one_adam",
}

__all__ = ["Clan", "DeMo", "DiLoCo", "MomentumSGD", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"]

if TYPE_CHECKING:
    from .clan import Clan as Clan
    from .demo import DeMo as DeMo
    from .diloco import DiLoCo as DiLoCo
    from .momentum_sgd import MomentumSGD as MomentumSGD
    from .onebit_adam import OnebitAdam as OnebitAdam
    from .onebit_lamb import OnebitLamb as OnebitLamb
    from .zero_one_adam import ZeroOneAdam as ZeroOneAdam


def __getattr__(name: str) -> Any:  # Clan needs no numba, whose import takes a second
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
