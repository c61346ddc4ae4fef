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

    Args:
        params: see ``synchronised.SynchronisedOptimizer``.
        session, lr, weight_decay, sign: see ``espresso_mpi.optim.DeMo``.

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
