"""1-bit Adam as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..optim.onebit_adam import OnebitRule
from ..session import Session
from .synchronised import SynchronisedOptimizer


class OnebitAdam(SynchronisedOptimizer):
    """``espresso_mpi.optim.OnebitAdam`` with the interface of ``torch.optim.AdamW``.

    Args:
        params: see ``synchronised.SynchronisedOptimizer``.
        session, lr, betas, eps, weight_decay, warmup, warmup_compressor, update_clip: see
            ``espresso_mpi.optim.OnebitAdam``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     adam = espresso_mpi.torch.OnebitAdam(model.named_parameters(), session, lr=1e-3, warmup=100)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     adam.step()
    """

    rule_key: ClassVar[str] = "onebit_rule"

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup: int | str = "auto",
        warmup_compressor: str = "auto",
        update_clip: float | None = None,
    ) -> None:
        rule = OnebitRule(session, warmup, warmup_compressor, update_clip)
        super().__init__(params, rule, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @property
    def frozen(self) -> bool:
        """Whether the warm-up has ended, so that messages are compressed."""
        return bool(self._rule.counters.frozen_at)
