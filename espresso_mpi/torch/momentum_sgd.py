"""SGD with compressed momenta as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..optim.momentum_sgd import MomentumRule
from ..optim.settings import SGDSettings
from ..session import Session
from .synchronised import SynchronisedOptimizer


class MomentumSGD(SynchronisedOptimizer):
    """``espresso_mpi.optim.MomentumSGD`` with the interface of ``torch.optim.SGD``.

    Args:
        params: see ``synchronised.SynchronisedOptimizer``.
        session, lr, momentum, weight_decay, nesterov, warmup: see ``espresso_mpi.optim.MomentumSGD``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     sgd = espresso_mpi.torch.MomentumSGD(model.named_parameters(), session, lr=0.1)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     sgd.step()
    """

    rule_key: ClassVar[str] = "momentum_rule"
    settings: ClassVar = SGDSettings

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        warmup: int = 0,
    ) -> None:
        rule = MomentumRule(session, warmup)
        super().__init__(params, rule, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
