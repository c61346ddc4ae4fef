"""0/1 Adam as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ..optim.zero_one_adam import Policy, ZeroOneRule
from ..session import Session
from .synchronised import SynchronisedOptimizer


class ZeroOneAdam(SynchronisedOptimizer):
    """``espresso_mpi.optim.ZeroOneAdam`` with the interface of ``torch.optim.AdamW``.

    Args:
        params: see ``synchronised.SynchronisedOptimizer``.
        session, lr, betas, eps, weight_decay, warmup, kappa, double_every, longest, warmup_compressor, update_clip:
            see ``espresso_mpi.optim.ZeroOneAdam``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     adam = espresso_mpi.torch.ZeroOneAdam(model.named_parameters(), session, lr=1e-3, warmup=100)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     adam.step()
        ...     adam.average()  # before validation, and at the end
    """

    rule_key: ClassVar[str] = "zero_one_rule"

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup: int = 1000,
        kappa: int = 16,
        double_every: int | None = None,
        longest: int = 16,
        warmup_compressor: str = "auto",
        update_clip: float | None = None,
    ) -> None:
        policy = Policy.checked("ZeroOneAdam", warmup, kappa, double_every, longest)
        self._zero_one = ZeroOneRule(session, policy, warmup_compressor, update_clip)
        super().__init__(params, self._zero_one, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def average(self) -> None:
        """Synchronise what local steps have changed, so that all ranks have the same parameters. Collective."""
        self._update(self._zero_one.average, self._zero_one.fail_average, held=True)
