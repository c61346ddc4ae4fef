"""One rank's model and optimizer in PyTorch. Nothing imports this file but suites that train, when they run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError


class Replica:
    """One rank's model and optimizer.

    Args:
        model: called with inputs and targets, it returns the mean loss in nats.
        optimizer: "adamw", with PyTorch's betas 0.9 and 0.999 and weight decay 0.01; "sgd"; or "muon", which is Muon
            for the matrices of hidden layers and this AdamW for the others, at one learning rate.
        momentum: of "sgd".
        threads: of this rank's matrix products, at most: fewer that ``OMP_NUM_THREADS`` has set stay. The nodes of the
            lab share their cores.

    Raises:
        ConfigError: "muon" for a network that has no such matrices, or by a PyTorch that has no Muon.
    """

    def __init__(self, model: nn.Module, optimizer: str, momentum: float, threads: int) -> None:
        torch.set_num_threads(min(threads, torch.get_num_threads()))
        self.model = model
        self._optimizers = _optimizers(model, optimizer, momentum)

    def gradients(
        self, inputs: np.ndarray, targets: np.ndarray, run: Callable[..., Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The gradient of the mean loss on a batch: the arrays that ``update`` applies.

        Args:
            run: what computes the loss, such as DDP around the model; default: the model.
        """
        self.model.zero_grad(set_to_none=False)
        (run or self.model)(torch.from_numpy(inputs), torch.from_numpy(targets)).backward()
        return {name: weights.grad for name, weights in self.model.named_parameters()}

    def update(self, rate: float) -> None:
        """One step of the optimizer with learning rate ``rate``."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

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


def _optimizers(model: nn.Module, optimizer: str, momentum: float) -> list[torch.optim.Optimizer]:
    parameters = dict(model.named_parameters())
    if optimizer == "sgd":
        return [torch.optim.SGD(parameters.values(), lr=0.0, momentum=momentum)]
    if optimizer == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=0.0)]
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"Muon: PyTorch {torch.__version__} has none; expected 2.9 or newer; pip install -U torch")
    hidden = [parameters.pop(name) for name in _hidden_matrices(model)]
    if not hidden:
        raise ConfigError("Muon needs matrices in hidden layers; this network has none")
    # steps as large as those of AdamW, and its weight decay, so that one learning rate fits both
    muon = torch.optim.Muon(hidden, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(parameters.values(), lr=0.0)]


def _hidden_matrices(model: nn.Module) -> list[str]:
    """Their names: matrices that are neither tables of embeddings nor in the head."""
    tables = {weights for layer in model.modules() if isinstance(layer, nn.Embedding) for weights in layer.parameters()}
    return [
        name
        for name, weights in model.named_parameters()
        if weights.ndim == 2 and weights not in tables and not name.startswith("head.")
    ]


def version() -> str:
    """PyTorch's version: runs of different ones are not compared."""
    return str(torch.__version__)
