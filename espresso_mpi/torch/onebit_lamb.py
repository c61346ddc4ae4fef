"""1-bit LAMB as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..optim.onebit_lamb import LambRule
from ..session import Session
from .synchronised import SynchronisedOptimizer


class OnebitLamb(SynchronisedOptimizer):
    """``espresso_mpi.optim.OnebitLamb`` with the interface of torch's optimizers.

    Args:
        params: see ``synchronised.SynchronisedOptimizer``.
        session, lr, betas, eps, weight_decay, warmup, warmup_compressor, coefficients: see
            ``espresso_mpi.optim.OnebitLamb``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     lamb = espresso_mpi.torch.OnebitLamb(model.named_parameters(), session, lr=1e-3, warmup=100)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     lamb.step()
    """

    rule_key: ClassVar[str] = "lamb_rule"

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        warmup: int = 1000,
        warmup_compressor: str = "auto",
        coefficients: tuple[float, float] = (0.01, 10.0),
    ) -> None:
        rule = LambRule(session, warmup, warmup_compressor, coefficients)
        super().__init__(params, rule, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
