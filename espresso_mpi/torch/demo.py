"""DeMo as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..optim.demo import DeMoRule
from ..optim.settings import DeMoSettings
from ..session import Session
from .synchronised import SynchronisedOptimizer


class DeMo(SynchronisedOptimizer):
    """``espresso_mpi.optim.DeMo`` with the interface of torch's optimizers.

    It synchronises by itself: use neither DDP nor ``GradientSync``, and no ``GradScaler``, with it. Gradients are those
    of this rank; clip them before ``step``.

    Args:
        params: parameters, named parameters or groups, as for every optimizer of torch.
        session, lr, weight_decay, sign: as for ``espresso_mpi.optim.DeMo``.

    Raises:
        ConfigError: a number is out of its range, or the session has no plain error feedback, or would skip values that
            are not finite.
        GradientError: a parameter is not of float32 or float64.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="dct_topk", feedback="plain:decay=0.999") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     demo = espresso_mpi.torch.DeMo(model.named_parameters(), session, lr=1e-3)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     demo.step()
    """

    rule_key: ClassVar[str] = "demo_rule"
    settings: ClassVar = DeMoSettings

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        sign: bool = True,
    ) -> None:
        super().__init__(params, DeMoRule(session), lr=lr, weight_decay=weight_decay, sign=sign)
