"""Optimizers of torch that synchronise by themselves: one class for each rule of ``espresso_mpi.optim``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from ..arrays import buffers
from ..errors import StateError
from ..optim.rules import Rule, Slot
from ..optim.settings import AdamSettings, DeMoSettings, SGDSettings
from ..optim.tensors import native, tensor_of

_AS_IN_ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
"""Names of kept arrays in the state of a parameter: those of torch's optimizers where there is one."""


class SynchronisedOptimizer(torch.optim.Optimizer):
    """The base class of the optimizers of torch that synchronise by a session.

    Gradients are those of this rank. Clip them before ``step``. Use neither DDP nor ``GradientSync`` with such an
    optimizer, and no ``GradScaler``. Learning rate schedulers and parameter groups work as with every optimizer of
    torch. A number that is out of its range and a session that would skip values that are not finite are a ConfigError.
    A parameter that is neither float32 nor float64 is a GradientError.

    Args:
        params: parameters, named parameters or groups, as for every optimizer of torch.
        rule: updates the parameters.
        defaults: the hyperparameters of groups that have none of their own, by name.

    Attributes:
        rule_key: where a state dict holds the counters of the rule.
        settings: checks the hyperparameters of a parameter group.
    """

    rule_key: ClassVar[str]
    settings: ClassVar[type[AdamSettings] | type[SGDSettings] | type[DeMoSettings]] = AdamSettings

    def __init__(self, params: Iterable[Any], rule: Rule[Any], **defaults: Any) -> None:
        self._rule = rule
        self._messages: dict[torch.Tensor, torch.Tensor] = {}
        self._settings(defaults)
        super().__init__(params, defaults)

    def _settings(self, group: Mapping[str, Any]) -> Any:
        """Checked settings of a parameter group, whose learning rate may be a tensor."""
        given = {field.name: group[field.name] for field in dataclasses.fields(self.settings)}
        return self.settings.checked(self._rule.owner, **{**given, "lr": float(group["lr"])})

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
        self._update(self._rule.step)
        return loss

    def _update(self, update: Callable[[list[Slot[Any]]], None]) -> None:
        """Let the rule change all parameters."""
        slots = list(self._slots())
        update(slots)
        buffers.rebuild([p for p in self._parameters() if p.numel()], [slot.tensor.adopted for slot in slots])

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer, with the counters of the rule. Residuals are the session's state."""
        counters = self._rule.state()
        state: dict[str, Any] = super().state_dict()
        return {**state, self.rule_key: counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: it is the state of another optimizer, or its counters are damaged. Nothing has been changed
                then.
        """
        if self.rule_key not in state:
            owner = self._rule.owner
            raise StateError(f"{owner}: the state lacks {self.rule_key!r}; load the state of a {owner}")
        counters = self._rule.read(state[self.rule_key])
        super().load_state_dict({key: value for key, value in state.items() if key != self.rule_key})
        self._rule.adopt(counters)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _slots(self) -> Iterator[Slot[Any]]:
        for number, group in enumerate(self.param_groups):
            settings = self._settings(group)
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"]):
                if parameter.numel():
                    yield self._slot(name, parameter, settings)

    def _slot(self, name: str, parameter: torch.Tensor, settings: Any) -> Slot[Any]:
        tensor, state = tensor_of(name, parameter), self.state[parameter]
        names = {key: _AS_IN_ADAM.get(key, key) for key in self._rule.kept}
        for key, kept in self._rule.kept.items():
            if names[key] not in state:
                state[names[key]] = kept.start(tensor)
        if parameter not in self._messages:
            self._messages[parameter] = tensor.library.zeros(tensor).reshape(parameter.shape)
        gradient = None if parameter.grad is None else native(tensor, parameter.grad)
        arrays = {key: state[names[key]] for key in self._rule.kept}
        return Slot(tensor, gradient, settings, arrays, self._messages[parameter])
