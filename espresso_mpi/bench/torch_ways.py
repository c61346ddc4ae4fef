"""The ways in which ``bench torch`` trains: each a model, an optimizer, and what synchronises the gradients.

Nothing imports this file but ``bench torch``, when it runs: it needs PyTorch.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .averaging import Averaged
from .averaging import open_groups as open_groups
from .gpt import GPT
from .gpt_shape import Shape

_MOST = 200
"""Steps after which a session that plans by itself must have a plan, and ``GradientSync`` must know what is quicker."""


class Way:
    """One way; ``step`` is one step of training on a batch that stays the same. Collective, as are its methods.

    Args:
        spec: way and method, as for ``averaging.Averaged``.
        gloo: its process group.
    """

    def __init__(self, comm: Any, spec: str, shape: Shape, batch: int, gloo: Any) -> None:
        self.spec, model = spec, GPT(shape, seed=0)
        self._averaged = Averaged(comm, spec, model, gloo)
        self.planning: tuple[float, int] | None = None
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(comm.rank)
        self._data = torch.randint(0, shape.alphabet, (2, batch, shape.context), generator=generator)

    def settle(self) -> None:
        """Compile, rebuild buckets, plan, and find out whether to overlap."""
        start, steps = time.perf_counter(), 0
        while steps < 4 or (not self._averaged.settled() and steps < _MOST):
            self.step()
            steps += 1
        if self._averaged.session is not None and self._averaged.session.planned:
            self.planning = (time.perf_counter() - start, steps)

    def step(self) -> None:
        """Forward, backward, synchronise, update."""
        self._optimizer.zero_grad()
        self._averaged.run(*self._data).backward()
        self._averaged.wait()
        self._optimizer.step()

    def close(self) -> None:
        """Give back the session."""
        self._averaged.close()
