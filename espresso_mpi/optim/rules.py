"""What optimizers that synchronise by themselves share: a rule for all frameworks, and the class for plain arrays.

A rule is what an optimizer does with the parameters of one step, whatever framework they come from. The class of this
module gives it arrays; ``espresso_mpi.torch`` gives it the parameters of a torch optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NoReturn, TypeVar

import msgspec
import numpy as np

from ..arrays import buffers
from ..compressors import get
from ..errors import EspressoError, NonFiniteError
from . import saved
from .messages import check_session, wait_for
from .settings import MOST, AdamSettings, number
from .tensors import Tensor, as_before, matched, message_of, native, tensors_of
from .updates import MOMENTUM
from .warmup_trials import SAFE, WarmupTrials

if TYPE_CHECKING:
    from ..session import Session
    from ..sessions.handles import Handle
    from ..tuning import OptimizerRule

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A counter in a saved state."""

C = TypeVar("C")
S = TypeVar("S", bound=Any)


@dataclass(frozen=True)
class KeptArray:
    """An array that an optimizer keeps for each parameter: flat, float32, zeros at first.

    Attributes:
        positive: it has no values below zero.
        parameter: it begins as a copy of the parameter, and has its type.
    """

    positive: bool = False
    parameter: bool = False

    def start(self, tensor: Tensor) -> Any:
        """The array before the first step."""
        return tensor.library.copy(tensor.array) if self.parameter else tensor.library.zeros(tensor)

    def load(self, tensor: Tensor, entry: Any, key: str) -> np.ndarray:
        """The array from a saved state, checked; float64 holds every parameter exactly."""
        return saved.array(tensor, entry, key, np.float64 if self.parameter else np.float32, self.positive)


@dataclass
class Slot(Generic[S]):
    """One parameter in a step.

    Attributes:
        tensor: the parameter.
        gradient: this rank's gradient, flat, of any floating-point type; None counts as zero.
        settings: hyperparameters of this step.
        kept: the arrays that the rule keeps, by name.
        message: what is synchronised: float32, in the parameter's shape.
        new: whether the kept arrays begin with this step.
    """

    tensor: Tensor
    gradient: Any
    settings: S
    kept: Mapping[str, Any]
    message: Any
    new: bool = False

    @property
    def flat(self) -> Any:
        """The message as a flat array over the same memory."""
        return self.message.reshape(-1)

    def put_gradient(self) -> None:
        """Copy the gradient to the message."""
        self.flat[...] = 0 if self.gradient is None else self.gradient


class Unusable:
    """Stands for a message that this rank cannot make: the call that reads it fails on all ranks with this error."""

    def __init__(self, error: EspressoError) -> None:
        self._error, self._trace = error, error.__traceback__

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error.with_traceback(self._trace)  # of several calls, none adds to the text of the others


class Rule(ABC, Generic[C]):
    """What an optimizer does with the parameters of one step.

    Args:
        session: synchronises the messages.
        counters: a frozen dataclass of numbers: the state beside the arrays. The same on all ranks.

    Attributes:
        owner: name of the optimizer in errors.
        kept: the arrays of each parameter, by name.
        judged_for: what a session with ``plan="auto"`` judges compressors for; see ``Session.judge_for``.
        resting: finds the parameters that do not take part in the present step.

    Raises:
        ConfigError: the session would skip values that are not finite.
    """

    owner: ClassVar[str]
    kept: ClassVar[Mapping[str, KeptArray]]
    judged_for: ClassVar[OptimizerRule] = "adam-momentum"

    def __init__(self, session: Session, counters: C) -> None:
        check_session(self.owner, session, self.judged_for)
        self.resting: Callable[[], Sequence[Slot[Any]]] = lambda: ()
        self._session, self.counters = session, counters

    @property
    def session(self) -> Session:
        """The session that synchronises the messages."""
        return self._session

    @abstractmethod
    def step(self, slots: Sequence[Slot[Any]]) -> None:
        """Update all parameters. Collective.

        Raises:
            EspressoError: as ``Session.sync``, on every rank. No parameter and no kept array has changed then. In a
                warm-up by a compressor, gradients travel one by one: residuals of the others have changed.
        """

    def fail(self, names: Sequence[str], error: EspressoError) -> NoReturn:
        """Take part in a step that this rank cannot take, so that all ranks get the error. Collective as ``step``.

        Args:
            names: of the parameters of the step.

        Raises:
            EspressoError: always: on every rank if the step sends something, else on this rank alone, which must repeat
                the step.
        """
        if names:
            self._send({name: Unusable(error) for name in names})
        raise error

    def _send(self, messages: Mapping[str, Any]) -> None:
        """Make the calls of the next step, if it makes any."""
        self._session.sync(messages)

    def holds(self, name: str) -> bool:
        """Whether a parameter has changes that the ranks have not synchronised."""
        return False

    def state(self) -> dict[str, Any]:
        """The counters, for a checkpoint.

        Raises:
            ConfigError: the rule cannot be saved now.
        """
        return dataclasses.asdict(self.counters)  # type: ignore[call-overload]

    def read(self, state: Any, names: Iterable[str]) -> C:
        """Checked counters from ``state``, for ``adopt``.

        Args:
            names: of the parameters.

        Raises:
            StateError: they are missing or damaged, or those of other parameters.
        """
        return saved.counters(self.owner, state, type(self.counters))

    def adopt(self, counters: C) -> None:
        """Continue with the counters of a state, whose arrays the caller loads."""
        self.counters = counters

    def _sync(self, slots: Sequence[Slot[Any]]) -> None:
        """Replace the messages by their means, by the compressor of the session."""
        if slots:
            Rule._send(self, {slot.tensor.name: slot.message for slot in slots})


class GradientMeans:
    """Synchronises gradients in the steps of a warm-up, with names of their own, so that residuals stay apart.

    Args:
        owner: name of the optimizer.
        compressor: spec, or ``"auto"``; tensors that the session's ``min_bytes`` or ``dense`` name are sent
            uncompressed.

    Raises:
        ConfigError: it is no spec of a compressor.
    """

    def __init__(self, owner: str, session: Session, compressor: str = "none") -> None:
        self._owner, self._session = owner, session
        self._trials: WarmupTrials | None = None
        if compressor == "auto":
            self._trials = WarmupTrials(session, owner) if session.plans_itself else None
            compressor = "none" if self._trials is None else SAFE
        self._compressor = "none" if compressor == "none" else str(get(compressor))

    def __call__(self, slots: Sequence[Slot[Any]]) -> None:
        """Put the mean of the gradients in place of the messages. Collective.

        Raises:
            NonFiniteError: on every rank: a gradient is not finite on one of them.
        """
        for slot in slots:
            slot.put_gradient()
        begin = time.perf_counter()
        wait_for([self.push(slot.tensor.name, slot.message) for slot in slots])
        if self._trials is not None:
            self._compressor = self._trials.after(time.perf_counter() - begin)
        found = [slot.tensor.library.finite(slot.flat) for slot in slots]  # before the host waits for any of them
        for slot, finite in zip(slots, found):
            self.require_finite(slot.tensor.name, bool(finite))

    def fail(self, messages: Mapping[str, Unusable]) -> None:
        """Make the calls of a step with errors in the place of messages. Collective."""
        wait_for([self._started(name, message, "none") for name, message in messages.items()])

    def push(self, name: str, message: Any) -> Handle:
        """Start to replace a float32 array by its mean. Collective."""
        dense = self._session.stays_dense(name, math.prod(message.shape) * 4)
        return self._started(name, message, "none" if dense else self._compressor)

    def _started(self, name: str, message: Any, compressor: str) -> Handle:
        feedback = "none" if compressor == "none" else "auto"
        handle: Handle = self._session.allreduce(
            message, name=f"{self._owner} {name}", compressor=compressor, feedback=feedback, blocking=False
        )
        return handle

    @staticmethod
    def require_finite(name: str, finite: bool) -> None:
        """Refuse a mean that is not finite. All ranks have the same means, so all raise the same error.

        Raises:
            NonFiniteError: it is not.
        """
        if not finite:
            raise NonFiniteError(
                f"{name}: the gradient of a rank holds a NaN or an infinity; expected finite ones; nothing has been "
                f"changed: skip this step on all ranks"
            )


def put_momenta(slots: Sequence[Slot[AdamSettings]]) -> None:
    """Put ``β₁ m + (1 - β₁) g`` of this rank into the messages; m stays as it is until they are synchronised."""
    for slot in slots:
        first = slot.settings.betas[0]
        slot.put_gradient()
        MOMENTUM(slot.tensor.library, (slot.flat, slot.kept["m"]), (first, 1 - first))


class SynchronisedOptimizer:
    """The base class of the optimizers of plain arrays that synchronise by a session.

    ``step`` takes the gradients of this rank. All ranks must start from the same parameters. They stay equal to the
    bit, unless the class says otherwise. The classes share these arguments:

    - ``params``: float32 or float64 arrays in nested lists, tuples and dicts. They are updated in place, as for
      ``Clan``.
    - ``session``: its compressor, feedback and route are those of the messages. Tensors below its ``min_bytes`` are
      sent uncompressed. It needs ``nonfinite="raise"``, the default.
    - ``lr``: η. It is an attribute, and can be set between steps.
    - ``betas``: β₁ and β₂, for the variants of Adam.
    - ``eps``: ε.
    - ``weight_decay``: λ, decoupled from the gradient.

    They raise a ConfigError for a number that is out of its range and for a session that would skip values that are not
    finite, and a GradientError for a parameter that cannot be updated.

    Args:
        params: as above.
        rule: updates the parameters.
        settings: the hyperparameters of all parameters, a frozen dataclass with ``lr``.
    """

    def __init__(self, params: Any, rule: Rule[Any], settings: Any) -> None:
        self._params, self._rule, self._settings = params, rule, settings
        tensors = tensors_of(params)
        self._kept = {t.name: {key: kept.start(t) for key, kept in rule.kept.items()} for t in tensors}
        self._messages = {t.name: message_of(t) for t in tensors}

    @property
    def lr(self) -> float:
        """The learning rate η of the next step."""
        return float(self._settings.lr)

    @lr.setter
    def lr(self, value: float) -> None:
        self._settings = dataclasses.replace(self._settings, lr=number(self._rule.owner, "lr", value, 0, MOST))

    def step(self, grads: Any) -> Any:
        """Update the parameters once. Collective.

        Args:
            grads: this rank's gradients, not synchronised: arrays with the names and shapes of the parameters. None
                counts as zero. Not changed.

        Returns:
            The parameters: the same containers, unless they hold arrays that cannot be changed (JAX).

        Raises:
            GradientError: the names or shapes are others than the parameters', or an array cannot be read.
            EspressoError: as ``Session.sync``. In a step that sends something, every rank raises it, also if only one
                has unusable gradients; else this rank alone, which must repeat the step. Nothing has been changed then.
        """
        try:
            tensors = self._tensors()
            values = matched(tensors, dict(buffers.flatten(grads)))
            slots = [self._slot(t, values.get(t.name)) for t in tensors if t.size]
        except EspressoError as error:
            self._rule.fail([name for name, message in self._messages.items() if math.prod(message.shape)], error)
        return self._updated(tensors, slots, self._rule.step)

    def _tensors(self) -> list[Tensor]:
        return as_before(self._rule.owner, tensors_of(self._params), self._messages)

    def _updated(self, tensors: Sequence[Tensor], slots: Sequence[Slot[Any]], update: Any) -> Any:
        """The parameters after an update of all slots."""
        update(slots)
        self._params = buffers.rebuild(self._params, [tensor.adopted for tensor in tensors])
        return self._params

    def _slot(self, tensor: Tensor, value: Any) -> Slot[Any]:
        gradient = None if value is None else native(tensor, value)
        return Slot(tensor, gradient, self._settings, self._kept[tensor.name], self._messages[tensor.name])

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the kept arrays of each tensor as numpy arrays: a copy.

        Residuals are the session's state.
        """
        arrays = {
            t.name: {key: t.library.to_host(array) for key, array in self._kept[t.name].items()}
            for t in tensors_of(self._params)
        }
        return {"rule": self._rule.state(), "moments": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        The parameters, ``lr`` and the state of the session are the caller's to restore.

        Raises:
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed then.
        """
        tensors, rule = tensors_of(self._params), self._rule
        found = saved.entries(rule.owner, state, self._kept, "moments")
        loaded = {t.name: {key: kept.load(t, found[t.name], key) for key, kept in rule.kept.items()} for t in tensors}
        rule.adopt(rule.read(state.get("rule"), self._kept))
        for tensor in tensors:
            for key, value in loaded[tensor.name].items():
                self._kept[tensor.name][key][...] = tensor.library.from_host(tensor, value)
