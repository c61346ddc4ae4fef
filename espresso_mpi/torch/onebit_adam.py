"""1-bit Adam as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..arrays import buffers
from ..errors import StateError
from ..optim.onebit_adam import OnebitRule, Slot
from ..optim.settings import AdamSettings
from ..optim.tensors import native, tensor_of
from ..session import Session

_RULE = "onebit_rule"


class OnebitAdam(torch.optim.Optimizer):
    """``espresso_mpi.optim.OnebitAdam`` with the interface of ``torch.optim.AdamW``.

    It synchronises by itself: use neither DDP nor ``GradientSync``, and no ``GradScaler``, with it. Gradients are those
    of this rank; clip them before ``step``. Learning rate schedulers and parameter groups work as with AdamW.

    Args:
        params: parameters, named parameters or groups, as for every optimizer of torch.
        session, lr, betas, eps, weight_decay, warmup, warmup_compressor: as for ``espresso_mpi.optim.OnebitAdam``.

    Raises:
        ConfigError: a number is out of its range, or the session would skip values that are not finite.
        GradientError: a parameter is not of float32 or float64.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     adam = espresso_mpi.torch.OnebitAdam(model.named_parameters(), session, lr=1e-3, warmup=100)
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     adam.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup: int | str = "auto",
        warmup_compressor: str = "none",
    ) -> None:
        AdamSettings.checked("OnebitAdam", lr, betas, eps, weight_decay)
        self._rule = OnebitRule(session, warmup, warmup_compressor)
        self._messages: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def frozen(self) -> bool:
        """Whether the warm-up has ended, so that messages are compressed."""
        return self._rule.frozen_at > 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Collective.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            The loss of the closure.

        Raises:
            EspressoError: as ``Session.sync``, on every rank. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = list(self._slots())
        self._rule.step(slots)
        tensors = [slot.tensor for slot in slots]
        buffers.rebuild([p for p in self._parameters() if p.numel()], [tensor.adopted for tensor in tensors])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer, with the counters of the warm-up. Residuals are the session's state."""
        state: dict[str, Any] = super().state_dict()
        return {**state, _RULE: self._rule.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: it is the state of another optimizer.
        """
        if _RULE not in state:
            raise StateError("OnebitAdam: the state has no counters of its warm-up; load the state of an OnebitAdam")
        super().load_state_dict({key: value for key, value in state.items() if key != _RULE})
        self._rule.load(state[_RULE])

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _slots(self) -> Iterator[Slot]:
        for number, group in enumerate(self.param_groups):
            settings = AdamSettings.checked(
                "OnebitAdam", float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
            )
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"]):
                if parameter.numel():
                    yield self._slot(name, parameter, settings)

    def _slot(self, name: str, parameter: torch.Tensor, settings: AdamSettings) -> Slot:
        tensor, state = tensor_of(name, parameter), self.state[parameter]
        if not state:
            state["exp_avg"] = tensor.library.zeros(tensor)
            state["exp_avg_sq"] = tensor.library.zeros(tensor)
        if parameter not in self._messages:
            self._messages[parameter] = tensor.library.zeros(tensor).reshape(parameter.shape)
        gradient = None if parameter.grad is None else native(tensor, parameter.grad)
        return Slot(tensor, gradient, settings, state["exp_avg"], state["exp_avg_sq"], self._messages[parameter])
