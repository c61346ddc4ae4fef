"""One rank's model and optimizer in PyTorch. Nothing imports this file but suites that train, when they run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class Replica:
    """One rank's model and optimizer.

    Args:
        model: called with inputs and targets, it returns the mean loss in nats.
        optimizer: "adamw", with PyTorch's betas 0.9 and 0.999 and weight decay 0.01, or "sgd".
        momentum: of "sgd".
        threads: of this rank's matrix products, at most: fewer that ``OMP_NUM_THREADS`` has set stay. The nodes of the
            lab share their cores.
    """

    def __init__(self, model: nn.Module, optimizer: str, momentum: float, threads: int) -> None:
        torch.set_num_threads(min(threads, torch.get_num_threads()))
        self.model = model
        parameters = self.model.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=0.0)
            if optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=0.0, momentum=momentum)
        )

    def gradients(
        self, inputs: np.ndarray, targets: np.ndarray, run: Callable[..., Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The gradient of the mean loss on a batch: the arrays that ``update`` applies.

        Args:
            run: what computes the loss, such as DDP around the model; default: the model.
        """
        self._optimizer.zero_grad(set_to_none=False)
        (run or self.model)(torch.from_numpy(inputs), torch.from_numpy(targets)).backward()
        return {name: weights.grad for name, weights in self.model.named_parameters()}

    def update(self, rate: float) -> None:
        """One step of the optimizer with learning rate ``rate``."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Mean loss in nats on a batch."""
        with torch.no_grad():
            return float(self.model(torch.from_numpy(inputs), torch.from_numpy(targets)))

    def digest(self) -> str:
        """SHA-256 of the weights' bits; equal exactly where two replicas agree to the last bit."""
        whole = hashlib.sha256()
        for weights in self.model.parameters():
            whole.update(weights.detach().numpy().tobytes())
        return whole.hexdigest()


def version() -> str:
    """PyTorch's version: runs of different ones are not compared."""
    return str(torch.__version__)
