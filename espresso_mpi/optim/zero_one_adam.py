"""0/1 Adam (Lu et al., ICLR 2023): the variance settles step by step, and some steps synchronise nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from ..errors import ConfigError, EspressoError, NonFiniteError, StateError
from .late import Late, fill_past, with_new
from .rules import Count, GradientMeans, KeptArray, Rule, Slot, SynchronisedOptimizer, Unusable
from .settings import AdamSettings, count, update_clip_of
from .updates import ADAM, FROM_ANCHOR, FROZEN_ADAM, LOCAL_ADAM, MEAN_MOMENTUM, MOMENTUM
from .zero_variance import TypicalVariances

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True)
class Counters:
    """The state of 0/1 Adam beside its moments.

    Attributes:
        steps: number of steps so far.
        updates: number of updates of the variance.
        next_update: the step of the next one, counted from 1; 0: there is none.
        synced_at: the last step that synchronised.
        late: see ``late.Late``.
    """

    steps: Count
    updates: Count
    next_update: Count
    synced_at: Count
    late: Late = ()

    def __post_init__(self) -> None:
        if max(self.updates, self.synced_at) > self.steps or 0 < self.next_update <= self.steps:
            raise ValueError("more updates or synchronisations than steps")


@dataclass(frozen=True)
class Policy:
    """In which steps, counted from 1, the variance is updated, and in which the ranks synchronise.

    Its methods take numbers, or arrays of the library that they are given: numpy, or JAX while it traces a program.

    Attributes: as the arguments of ``ZeroOneAdam``.
    """

    warmup: int
    kappa: int
    double_every: int | None
    longest: int

    @classmethod
    def checked(cls, owner: str, warmup: Any, kappa: Any, double_every: Any, longest: Any) -> Policy:
        """A policy of checked numbers.

        Raises:
            ConfigError: a number is out of its range.
        """
        every = None if double_every is None else count(owner, "double_every", double_every, 1)
        return cls(
            count(owner, "warmup", warmup, 1), count(owner, "kappa", kappa, 1), every,
            count(owner, "longest", longest, 1),
        )  # fmt: skip

    def update_after(self, step: Any, updates: Any, library: Any = np) -> Any:
        """The step of the next update of the variance; 0: there is none."""
        apart = _doubled(updates // self.kappa, library)
        return library.where(apart <= self.warmup - step, step + apart, 0)

    def interval(self, step: Any, library: Any = np) -> Any:
        """The distance of the synchronisation in this step, if there is one, from the one before it."""
        if self.double_every is None:
            return 1
        return library.minimum(self.longest, _doubled((step - self.warmup - 1) // self.double_every, library))


def _doubled(times: Any, library: Any) -> Any:
    """A one that is doubled so many times, none below 0, and no more than an int32 can hold."""
    return 1 << library.clip(times, 0, 30)


@dataclass
class _Local:
    """What is kept of a parameter since the last synchronisation.

    Attributes:
        anchor: the parameter there.
        u: the sum of the momenta since, by which the parameter has moved, each times its rate.
        length: the sum of the rates.
        kept: the share of the anchor that weight decay has left.
    """

    anchor: Any
    u: Any
    length: float = 0.0
    kept: float = 1.0

    def grown(self, rate: float, shrink: float) -> tuple[float, float]:
        """``length`` and ``kept`` after one more step."""
        return grown(self.length, self.kept, rate, shrink)


def grown(length: Any, kept: Any, rate: Any, shrink: Any) -> tuple[Any, Any]:
    """The sum of the rates and the share of the anchor after one more local step; numbers of any framework."""
    return shrink * length + rate, shrink * kept


class ZeroOneRule(Rule[Counters]):
    """What 0/1 Adam does with the parameters of one step.

    Args:
        session: synchronises the messages; its compressor is that of momenta.
        policy: in which steps.
        warmup_compressor, update_clip: as for ``ZeroOneAdam``.

    Raises:
        ConfigError: the session would skip values that are not finite, or the compressor is unknown.
    """

    owner: ClassVar[str] = "ZeroOneAdam"
    kept: ClassVar = {"m": KeptArray(), "v": KeptArray(positive=True)}

    def __init__(self, session: Session, policy: Policy, warmup_compressor: str, update_clip: float | None) -> None:
        super().__init__(session, Counters(0, 0, 1, 0))
        self._policy = policy
        self._mean_gradients = GradientMeans(self.owner, session, warmup_compressor)
        self._local: dict[str, _Local] = {}
        self._spoilt = False
        self._typical = TypicalVariances()
        self._clip = update_clip_of(self.owner, update_clip)

    def step(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Update all parameters. Collective in the steps that synchronise."""
        step, now = self.counters.steps + 1, self.counters
        late = with_new(now.late, slots, now.updates)
        if step == now.next_update:
            self._update_variance(slots, step, late)
        elif self._is_local(step):
            typical = self._typical.of(slots, self.resting)
            for slot in slots:
                self._move(slot, step, typical[slot.tensor.name])
            self.counters = replace(now, steps=step, late=late)
        else:
            self._synchronise(slots, step)
            self.counters = replace(now, steps=step, synced_at=step, late=late)

    def _is_local(self, step: int) -> bool:
        """Whether a step that does not update the variance sends nothing."""
        return bool(step - self.counters.synced_at < self._policy.interval(step))

    def _send(self, messages: Mapping[str, Any]) -> None:
        """As of every rule."""
        step = self.counters.steps + 1
        if step == self.counters.next_update:
            self._mean_gradients.fail(messages)
        elif not self._is_local(step):
            super()._send(messages)

    def fail_average(self, names: Sequence[str], error: EspressoError) -> NoReturn:
        """As ``fail``, of an ``average``."""
        if names and self.counters.synced_at < self.counters.steps:
            super()._send({name: Unusable(error) for name in names})
        raise error

    def average(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Synchronise now what local steps have changed. Collective."""
        now = self.counters
        if now.synced_at < now.steps:
            self._synchronise([slot for slot in slots if self.holds(slot.tensor.name)], now.steps, new=False)
            self.counters = replace(now, synced_at=now.steps)

    def holds(self, name: str) -> bool:
        """As of every rule: since local steps."""
        return name in self._local

    def state(self) -> dict[str, Any]:
        """As of every rule; not between local steps, where ranks differ."""
        if self.counters.synced_at < self.counters.steps:
            raise ConfigError("ZeroOneAdam: the ranks differ between local steps; call average() before state_dict()")
        return super().state()

    def read(self, state: Any, names: Iterable[str]) -> Counters:
        """As of every rule; only a state between two local steps has more steps than the last synchronisation."""
        counters = super().read(state, names)
        if counters.synced_at != counters.steps:
            raise StateError(
                f"ZeroOneAdam: got a state after {counters.steps} steps, synchronised after {counters.synced_at}; "
                f"expected the same number; load what state_dict returned"
            )
        return counters

    def adopt(self, counters: Counters) -> None:
        """As of every rule; the local steps since the last synchronisation are dropped."""
        self._local, self._spoilt = {}, False
        self._typical.forget()
        super().adopt(counters)

    def _update_variance(self, slots: Sequence[Slot[AdamSettings]], step: int, late: Late) -> None:
        """One step of AdamW on the mean of the gradients."""
        self._mean_gradients(slots)
        updates, typical = self.counters.updates + 1, self._typical.of(slots, self.resting)
        late = fill_past(slots, late, step - 1, updates - 1)
        self.counters = Counters(step, updates, int(self._policy.update_after(step, updates)), step, late)
        for slot in slots:
            s, (first, second) = slot.settings, slot.settings.betas
            scales = 1 / (1 - first**step), self._v_scale(s)
            numbers = (first, 1 - first, second, 1 - second, s.lr, *scales, s.eps, s.weight_decay)
            arrays = (slot.tensor.array, slot.kept["m"], slot.kept["v"], slot.flat)
            ADAM(slot.tensor.library, arrays, (*numbers, typical[slot.tensor.name]))
        self._typical.forget()

    def _v_scale(self, settings: AdamSettings) -> float:
        return 1 / (1 - settings.betas[1] ** self.counters.updates)

    def _move(self, slot: Slot[AdamSettings], step: int, typical: float) -> None:
        """A local step. A gradient that is not finite changes nothing; the next synchronisation raises the error."""
        s, tensor = slot.settings, slot.tensor
        local = self._local.get(tensor.name)
        if local is None:
            local = self._local[tensor.name] = _Local(tensor.library.copy(tensor.array), tensor.library.zeros(tensor))
        rate, shrink = _rate_of(s, step)
        local.length, local.kept = local.grown(rate, shrink)
        slot.put_gradient()
        if not tensor.library.finite(slot.flat):
            self._spoilt = True
            return
        arrays = (tensor.array, slot.kept["m"], local.u, slot.kept["v"], slot.flat)
        numbers = (s.betas[0], 1 - s.betas[0], rate, self._v_scale(s), s.eps, shrink, typical, self._clip)
        LOCAL_ADAM(tensor.library, arrays, numbers)

    def _synchronise(self, slots: Sequence[Slot[AdamSettings]], step: int, new: bool = True) -> None:
        """Replace the momenta by their mean since the last synchronisation, and the parameters by its result.

        Args:
            new: the gradients of the slots count, too.
        """
        for slot in slots:
            self._fill(slot, step, new)
        if self._spoilt and slots:
            slots[0].flat[:1] = float("nan")  # so that the session raises the error on every rank
        try:
            self._sync(slots)
        except NonFiniteError:
            self._spoilt = False
            raise
        typical = self._typical.of(slots, self.resting)
        for slot in slots:
            self._finish(slot, step, new, typical[slot.tensor.name])
        self._local = {}

    def _fill(self, slot: Slot[AdamSettings], step: int, new: bool) -> None:
        """What this rank sends of a parameter."""
        first, local = slot.settings.betas[0], self._local.get(slot.tensor.name)
        if new:
            slot.put_gradient()
        else:
            slot.flat[...] = 0
        if local is None:
            MOMENTUM(slot.tensor.library, (slot.flat, slot.kept["m"]), (first, 1 - first))
            return
        rate, shrink = _rate_of(slot.settings, step) if new else (0.0, 1.0)
        length, _ = local.grown(rate, shrink)
        if length:
            numbers = (first, 1 - first, rate, shrink, 1 / length)
        else:  # the rates were zero: the momentum of this rank, which u has no share of
            numbers = (first if new else 1.0, 1 - first, 1.0, 0.0, 1.0)
        MEAN_MOMENTUM(slot.tensor.library, (slot.flat, slot.kept["m"], local.u), numbers)

    def _finish(self, slot: Slot[AdamSettings], step: int, new: bool, typical: float) -> None:
        """The parameter and its momentum from the mean."""
        s, local, tensor, kept = slot.settings, self._local.get(slot.tensor.name), slot.tensor, slot.kept
        if local is None:
            m_scale = 1 / (1 - s.betas[0] ** step)
            numbers = (s.lr, m_scale, self._v_scale(s), s.eps, s.weight_decay, typical, self._clip * m_scale)
            FROZEN_ADAM(tensor.library, (tensor.array, kept["m"], kept["v"], slot.flat), numbers)
            return
        length, share = local.grown(*(_rate_of(s, step) if new else (0.0, 1.0)))
        arrays = (tensor.array, kept["m"], local.anchor, kept["v"], slot.flat)
        FROM_ANCHOR(tensor.library, arrays, (length, self._v_scale(s), s.eps, share, typical, self._clip))


def _rate_of(settings: AdamSettings, step: int) -> tuple[float, float]:
    """By how much of its momentum a parameter moves in a step, and the share of it that weight decay leaves."""
    rate = settings.lr / (1 - settings.betas[0] ** step)
    return rate, 1 - settings.lr * settings.weight_decay


class ZeroOneAdam(SynchronisedOptimizer):
    """AdamW that sends few gradients, momenta in few bits, and nothing in some steps (Lu et al., ICLR 2023).

    There is no first stage of gradients as in ``OnebitAdam``. The variance v is updated by the mean
    gradient in steps that become rarer, ``2^⌊j/κ⌋`` steps apart after j updates, until it stays as it is. In the other
    steps, the ranks synchronise their momenta by the session, as in ``OnebitAdam``. After the warm-up, the interval
    between these doubles from time to time. In the steps between, each rank moves along its own momentum::

        mᵢ ← β₁ mᵢ + (1 - β₁) gᵢ;  uᵢ ← uᵢ + η mᵢ;  xᵢ ← xᵢ - η mᵢ/(√v̂ + ε)
        in a synchronisation after steps of the rates η₁ … ηₖ, which began at x₀:
        m ← mean of C(uᵢ/Σηₕ + residualᵢ);  x ← x₀ - Σηₕ m/(√v̂ + ε);  u ← 0

    This is algorithm 1 of the paper with decoupled weight decay, with bias correction of m and v, and in two details as
    in the authors' program (DeepSpeed): a step that updates v takes the momentum from the mean gradient, too; and the
    residuals are those of momenta, so they do not depend on the learning rate.

    The parameters of the ranks are equal to the bit after each synchronisation, and differ between local steps.
    ``average`` makes them equal, for validation and at the end. If a gradient is not finite in a local step, the rank
    does not change its parameters, and the next synchronisation raises the error on all ranks.

    Args:
        params, session, lr, betas, eps, weight_decay: see ``rules.SynchronisedOptimizer``.
        warmup: number of first steps, all of which synchronise. v is updated in the warm-up only. The learning rate
            should have reached its peak by then.
        kappa: κ.
        double_every: number of steps after which the interval doubles, counted from the end of the warm-up. The paper
            takes the number in which the learning rate halves. With None, all steps synchronise.
        longest: the longest interval.
        warmup_compressor: spec of the compressor of the gradients that update v, with error feedback; ``"auto"``: see
            ``OnebitAdam``.
        update_clip: the largest magnitude of an element of m/(√v̂ + ε), but for steps that update v; see
            ``OnebitAdam``.

    Example:
        >>> params = {"w": np.ones((64, 128), np.float32)}
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     adam = espresso_mpi.optim.ZeroOneAdam(
        ...         params, session, lr=0.1, weight_decay=0, warmup=2, double_every=1
        ...     )
        ...     for step in range(6):
        ...         grads = {"w": np.full((64, 128), 0.5, np.float32)}  # of this rank, not synchronised
        ...         params = adam.step(grads)
        ...     params = adam.average()
        >>> round(float(params["w"].mean()), 3)
        0.4
    """

    def __init__(
        self,
        params: Any,
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
        settings = AdamSettings.checked("ZeroOneAdam", lr, betas, eps, weight_decay)
        policy = Policy.checked("ZeroOneAdam", warmup, kappa, double_every, longest)
        super().__init__(params, ZeroOneRule(session, policy, warmup_compressor, update_clip), settings)

    def average(self) -> Any:
        """Synchronise what local steps have changed, so that all ranks have the same parameters. Collective.

        Returns:
            As ``step``.

        Raises:
            EspressoError: as ``step``.
        """
        try:
            tensors = self._tensors()
            slots = [self._slot(t, None) for t in tensors if t.size]
        except EspressoError as error:
            self._zero_one.fail_average(list(self._messages), error)
        return self._updated(tensors, slots, self._zero_one.average)

    @property
    def _zero_one(self) -> ZeroOneRule:
        assert isinstance(self._rule, ZeroOneRule)
        return self._rule
