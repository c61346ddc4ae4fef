"""CLAN as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..arrays import buffers
from ..optim.clan import Moments, length_of, moments_of, update
from ..optim.settings import AdamSettings
from ..optim.tensors import read, tensor_of
from . import names
from .optimizer_states import saved_entries


class Clan(torch.optim.Optimizer):
    """``espresso_mpi.optim.Clan``: LANS on gradients that are synchronised already, by ``GradientSync`` or DDP.

    Parameters whose gradient is None stay as they are.

    Args:
        params: parameters or groups, as for every optimizer of torch; float32 or float64.
        lr, betas, eps, weight_decay: see ``espresso_mpi.optim.Clan``.

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> clan = espresso_mpi.torch.Clan(model.parameters(), lr=0.01)
        >>> with espresso_mpi.torch.GradientSync(model, compressor="onebit") as sync:
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     sync.wait()
        ...     clan.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _settings(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Args:
            closure: computes the loss and the synchronised gradients anew.

        Returns:
            The loss of the closure.

        Raises:
            NonFiniteError: a gradient holds a NaN or an infinity. Nothing has been changed then.
            GradientError: a parameter is neither float32 nor float64.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        named = [(*one, group) for n, group in enumerate(self.param_groups) for one in names.of_group(n, group)]
        moving = [(parameter, group) for _, parameter, group in named if parameter.grad is not None]
        tensors = [tensor_of(name, parameter) for name, parameter, _ in named if parameter.grad is not None]
        lengths = [length_of(tensor, parameter.grad) for tensor, (parameter, _) in zip(tensors, moving)]
        for tensor, length, (parameter, group) in zip(tensors, lengths, moving):
            state, settings = self.state[parameter], _settings(group)
            if not state:
                zeros = (tensor.library.zeros(tensor) for _ in range(2))
                state.update(zip(("step", "exp_avg", "exp_avg_sq"), (0, *zeros)))
            moments = Moments(state["step"], state["exp_avg"], state["exp_avg_sq"])
            gradient = tensor.library.single(read(tensor, parameter.grad) / (length + settings.eps))
            update(tensor, gradient, moments, settings)
            state["step"] = moments.steps
        buffers.rebuild([p for p, _ in moving], [tensor.adopted for tensor in tensors])
        return loss

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed then.
        """
        own = {p: name for n, group in enumerate(self.param_groups) for name, p in names.of_group(n, group)}
        found = {}
        for parameter, entry in saved_entries(self, state):
            tensor, keys = tensor_of(own[parameter], parameter), {"steps": "step", "m": "exp_avg", "v": "exp_avg_sq"}
            steps, m, v = moments_of(tensor, {key: entry.get(name) for key, name in keys.items()})
            arrays = (tensor.library.from_host(tensor, value) for value in (m, v))
            found[parameter] = dict(zip(keys.values(), (steps, *arrays)))
        super().load_state_dict(dict(state))
        for parameter, loaded in found.items():  # torch has given them the type of the parameter
            self.state[parameter].update(loaded)


def _settings(group: Mapping[str, Any]) -> AdamSettings:
    """Checked settings of a parameter group, whose learning rate may be a tensor."""
    return AdamSettings.checked("Clan", float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
