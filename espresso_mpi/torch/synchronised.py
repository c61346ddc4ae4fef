"""Optimizers of torch that synchronise by themselves: one class for each rule of ``espresso_mpi.optim``."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from ..arrays import buffers
from ..errors import ConfigError, EspressoError, StateError
from ..optim.rules import KeptArray, Rule, Slot
from ..optim.settings import AdamSettings, DeMoSettings, SGDSettings
from ..optim.tensors import as_before, message_of, native, tensor_of
from . import names
from .optimizer_states import copied, saved_entries

S = TypeVar("S", bound="SynchronisedOptimizer")

_AS_IN_ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
"""Names of kept arrays in the state of a parameter: those of torch's optimizers where there is one."""


class SynchronisedOptimizer(torch.optim.Optimizer):
    """The base class of the optimizers of torch that synchronise by a session.

    Gradients are those of this rank. Clip them before ``step``. Use neither DDP nor ``GradientSync`` with such an
    optimizer, and no ``GradScaler``. Learning rate schedulers and parameter groups work as with every optimizer of
    torch. Parameters that require no gradient stay as they are; they must be the same on all ranks. A ``grad`` of None
    counts as zero on this rank, because another one may have a gradient. Weight decay applies to the parameter then.

    A number that is out of its range and a session that would skip values that are not finite are a ConfigError. A
    parameter that is neither float32 nor float64 is a GradientError.

    Args:
        params: parameters, named parameters or groups, as for every optimizer of torch. Each has a name of its own in
            the session, also where a session has several optimizers: pass named parameters then.
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
        self._names: dict[torch.Tensor, str] = {}
        self._settings(defaults)
        weakref.finalize(self, names.free_all, rule.session, self._names).atexit = False
        super().__init__(params, defaults)

    def __deepcopy__(self: S, known: dict[int, Any]) -> S:
        """A copy by the same session, which goes on in the place of this one: both would share the residuals."""
        return copied(self, known, ("_rule", "_messages", "_names"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer.

        Raises:
            ConfigError: another parameter of this session has the same name, so that they would share a message and its
                residual.
        """
        super().add_param_group(param_group)
        known = set(self._names.values())
        given = names.of_group(len(self.param_groups) - 1, self.param_groups[-1])
        try:
            for name, _ in given:
                if name in known:
                    raise ConfigError(
                        f"{self._rule.owner}: two parameters are named {name!r}; expected names of their own, such as "
                        f"those of the whole model's named_parameters()"
                    )
                known.add(name)
            names.take_all(self._rule.session, given)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._names.update((parameter, name) for name, parameter in given)

    def _settings(self, group: Mapping[str, Any]) -> Any:
        """Checked settings of a parameter group, whose learning rate may be a tensor."""
        given = {field.name: group[field.name] for field in dataclasses.fields(self.settings)}
        lr = group["lr"].item() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        return self.settings.checked(self._rule.owner, **{**given, "lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Collective.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            The loss of the closure.

        Raises:
            EspressoError: as ``Session.sync``. In a step that sends something, every rank raises it, also if only one
                has an unusable gradient or group; else this rank alone, which must repeat the step. Nothing has been
                changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self._rule.step, self._rule.fail)
        return loss

    def _update(
        self, update: Callable[[list[Slot[Any]]], None], fail: Callable[[list[str], EspressoError], NoReturn],
        held: bool = False,
    ) -> None:  # fmt: skip
        """Let the rule change all parameters.

        Args:
            fail: takes part in the update with an error; gets the names of the parameters.
            held: change those alone that have changes which are not synchronised.
        """
        parameters, slots = list[torch.Tensor](), list[Slot[Any]]()
        counters = self._rule.counters
        try:
            try:
                self._gather(parameters, slots, held)
            except EspressoError as error:
                fail(self._names_of_step(held), error)
            update(slots)
        except BaseException:
            for parameter, slot in zip(parameters, slots):
                if slot.new and self._rule.counters is counters:  # it has taken no step yet
                    del self.state[parameter]
            raise
        buffers.rebuild(parameters, [slot.tensor.adopted for slot in slots])

    def _gather(self, parameters: list[torch.Tensor], slots: list[Slot[Any]], held: bool) -> None:
        """Add the parameters of an update, and their slots. What was added before an error stays."""
        resting = list[tuple[torch.Tensor, Any]]()
        for parameter, name, settings in self._parameters():
            if not self._moves(parameter, name, held):
                resting += [(parameter, settings)] if self.state.get(parameter) else []
                continue
            own = settings
            if not parameter.requires_grad:  # frozen between local steps
                own = dataclasses.replace(settings, lr=0.0, weight_decay=0.0)
            parameters.append(parameter)
            slots.append(self._slot(parameter, own))
        self._rule.resting = lambda: [self._slot(*one) for one in resting]

    def _moves(self, parameter: torch.Tensor, name: str, held: bool) -> bool:
        """Whether a parameter takes part in an update."""
        return bool(parameter.numel()) and (self._rule.holds(name) or (parameter.requires_grad and not held))

    def _names_of_step(self, held: bool) -> list[str]:
        """The names of the parameters that take part in an update, also if it cannot be made."""
        given = [pair for number, group in enumerate(self.param_groups) for pair in names.of_group(number, group)]
        known = [(self._names.get(parameter, name), parameter) for name, parameter in given]
        return [name for name, parameter in known if self._moves(parameter, name, held)]

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str, Any]]:
        """All parameters with their names and the settings of their groups."""
        for number, group in enumerate(self.param_groups):
            settings = self._settings(group)
            for index, parameter in enumerate(group["params"]):
                yield parameter, self._name(parameter, number, index), settings

    def _name(self, parameter: torch.Tensor, number: int, index: int) -> str:
        """The name of a parameter, which may have taken the place of another one in its group."""
        if parameter not in self._names:
            name, _ = names.of_group(number, self.param_groups[number])[index]
            before = {known: p for p, known in self._names.items()}.get(name)
            if before is not None:
                names.free(self._rule.session, name, before)
                del self._names[before]
            names.take(self._rule.session, name, parameter)
            self._names[parameter] = name
        return self._names[parameter]

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer, with the counters of the rule. Residuals are the session's state."""
        counters = self._rule.state()
        state: dict[str, Any] = super().state_dict()
        return {**state, self.rule_key: counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: it is the state of another optimizer or of other parameters, or it is damaged. Nothing has been
                changed then.
        """
        if self.rule_key not in state:
            owner = self._rule.owner
            raise StateError(f"{owner}: the state lacks {self.rule_key!r}; load the state of a {owner}")
        counters = self._rule.read(state[self.rule_key], self._names.values())
        arrays = self._read_arrays(state)
        super().load_state_dict({key: value for key, value in state.items() if key != self.rule_key})
        for parameter, loaded in arrays.items():  # torch has given them the type of the parameter
            self.state[parameter].update(loaded)
        self._rule.adopt(counters)

    def _read_arrays(self, state: Mapping[str, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The kept arrays of a state, checked, by the parameters to which torch gives them."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for parameter, entry in saved_entries(self, state):
            tensor = tensor_of(self._names[parameter], parameter)
            found[parameter] = {
                key: tensor.library.from_host(tensor, kept.load(tensor, entry, key)) for key, kept in self._kept.items()
            }
        return found

    @property
    def _kept(self) -> dict[str, KeptArray]:
        """The arrays of a parameter by their names in its state."""
        return {_AS_IN_ADAM.get(key, key): kept for key, kept in self._rule.kept.items()}

    def _slot(self, parameter: torch.Tensor, settings: Any) -> Slot[Any]:
        tensor = tensor_of(self._names[parameter], parameter)
        if parameter not in self._messages:
            self._messages[parameter] = message_of(tensor)
        as_before(self._rule.owner, [tensor], {tensor.name: self._messages[parameter]})
        used = parameter.requires_grad and parameter.grad is not None
        gradient = native(tensor, parameter.grad) if used else None
        state = self.state[parameter]
        new = not self._kept.keys() <= state.keys()
        for key, kept in self._kept.items():
            if key not in state:
                state[key] = kept.start(tensor)
        arrays = {key: state[_AS_IN_ADAM.get(key, key)] for key in self._rule.kept}
        return Slot(tensor, gradient, settings, arrays, self._messages[parameter], new)
