"""1-bit Adam, SGD with momentum and DeMo for optax: momenta are synchronised in few bits, inside ``jit``.

Their arithmetic is that of ``espresso_mpi.optim``: the formulas of ``optim.updates``, on arrays of JAX. May import: JAX
and the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from ..errors import ConfigError
from ..optim.demo import require_residuals
from ..optim.formulas import adam, decayed_momentum, frozen_adam, momentum, sgd
from ..optim.onebit_adam import EVERY, norms_between, settled, settled_everywhere
from ..optim.rules import GradientMeans
from ..optim.settings import AdamSettings, DeMoSettings, SGDSettings, update_clip_of
from ..session import Session
from .arguments import optax_for, steps, unbiased, usable
from .trees import averaged_tree, called, counter, like, mapped, one_chain, single, typical_variances, zeros

_MOST_NORMS = 100_000
"""Norms of v that a state holds at most."""


class OnebitAdamState(NamedTuple):
    """The state of ``scale_by_onebit_adam``.

    Attributes:
        count: number of updates so far, an int32.
        mu, nu: moments, float32, as the parameters.
        token: number of synchronisations so far, which orders them; see ``after`` of ``sync``.
        frozen_at: with ``warmup="auto"``, the last update of the warm-up, an int32; 0: it has not ended.
        norms: with ``warmup="auto"``, those of v in the last updates in which they were compared, float32.
    """

    count: Any
    mu: Any
    nu: Any
    token: Any
    frozen_at: Any = None
    norms: Any = None


class TraceState(NamedTuple):
    """The state of ``compressed_trace``: number of updates, momenta (float32), and as in ``OnebitAdamState``."""

    count: Any
    trace: Any
    token: Any


class DeMoState(NamedTuple):
    """The state of ``scale_by_demo``: as ``token`` of ``OnebitAdamState``. The momenta are residuals of the session."""

    token: Any


def scale_by_onebit_adam(
    session: Session | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    warmup: int | str = "auto",
    warmup_compressor: str = "auto",
    update_clip: float | None = None,
) -> Any:
    """1-bit Adam (``espresso_mpi.optim.OnebitAdam``) in the place of ``optax.scale_by_adam``.

    It synchronises by itself: pass the gradients of this rank. Its calls are ordered by its state, as those of
    ``synchronize``.

    Args:
        session: as for ``sync``; its compressor is that of the momenta.
        b1, b2, eps: β₁, β₂ and ε.
        warmup: number of first updates, which are Adam's. With ``"auto"``, they end as those of ``OnebitAdam``, and the
            update in which they did is ``frozen_at`` of the state.
        warmup_compressor: spec of the compressor of gradients in the warm-up, with error feedback. ``"auto"``:
            ``"int8"`` with ``Session(plan="auto")``, ``"none"`` with other sessions.
        update_clip: as for ``OnebitAdam``.

    Raises:
        ConfigError: optax is missing, an argument is not valid, the session would skip values that are not finite, or
            an update gets a state of another kind of warm-up. Errors of a synchronisation as for ``sync``.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = optax.chain(  # doctest: +SKIP
        ...     espresso_mpi.jax.scale_by_onebit_adam(session, warmup=1000),
        ...     optax.add_decayed_weights(0.01),
        ...     optax.scale_by_learning_rate(1e-3),
        ... )
    """
    owner = "scale_by_onebit_adam"
    optax = optax_for(owner, "use espresso_mpi.optim.OnebitAdam")
    AdamSettings.checked(owner, 0.0, (b1, b2), eps, 0.0)
    length = None if warmup == "auto" else steps(owner, "warmup", warmup, 1)
    if length is None and norms_between(b2) > _MOST_NORMS:
        raise ConfigError(
            f"{owner}: b2={b2!r} with warmup='auto', which compares norms 1/(1 - b2) steps apart; expected at most "
            f"{1 - 1 / (EVERY * _MOST_NORMS)}, or a number of steps as the warm-up"
        )
    chosen = usable(owner, session)
    means = GradientMeans("OnebitAdam", chosen, warmup_compressor)
    made = _OnebitAdam(owner, chosen, b1, b2, eps, length, means, update_clip_of(owner, update_clip))
    return optax.GradientTransformation(made.start, made.update)


@dataclass(frozen=True, eq=False)
class _OnebitAdam:
    """The functions of ``scale_by_onebit_adam``."""

    owner: str
    session: Session
    b1: float
    b2: float
    eps: float
    warmup: int | None  # None: it ends by itself
    gradient_means: GradientMeans
    clip: float

    def start(self, params: Any) -> OnebitAdamState:
        found = OnebitAdamState(counter(), zeros(params), zeros(params), counter())
        if self.warmup is not None:
            return found
        return found._replace(frozen_at=counter(), norms=jnp.zeros(norms_between(self.b2) + 1, jnp.float32))

    def update(self, updates: Any, state: OnebitAdamState, params: Any = None) -> tuple[Any, OnebitAdamState]:
        self._require_fit(state)
        one_chain(self, self.session)
        now = state.count + 1
        at = state.frozen_at if self.warmup is None else jnp.where(now > self.warmup, self.warmup, 0)
        scales = unbiased(self.b1, now), unbiased(self.b2, jnp.where(at > 0, at, now))
        found, state = jax.lax.cond(
            at == 0, partial(self._dense, state, scales), partial(self._compressed, state, scales), single(updates)
        )
        return like(found, updates), state._replace(count=now)

    def _require_fit(self, state: OnebitAdamState) -> None:
        known = None if state.norms is None else jnp.size(state.norms)
        expected = None if self.warmup is not None else norms_between(self.b2) + 1
        if known != expected:
            kinds = ["of a warm-up of fixed length" if n is None else f"of warmup='auto' with {n} norms of v"
                     for n in (known, expected)]  # fmt: skip
            raise ConfigError(
                f"{self.owner}: the state is {kinds[0]}; expected one {kinds[1]}; continue with the warmup and b2 of "
                f"before"
            )

    def _dense(self, state: OnebitAdamState, scales: Any, grads: Any) -> tuple[Any, OnebitAdamState]:
        """Adam's step on the mean of the gradients; a step of rate -1 from zero is the update."""
        step = adam(jnp.sqrt)
        numbers = (self.b1, 1 - self.b1, self.b2, 1 - self.b2, -1.0, *scales, self.eps, 0.0, 0.0)
        means, token = averaged_tree(grads, self.session, False, state.token, self.gradient_means)
        found, mu, nu = mapped(
            3, lambda m, v, g: step(jnp.zeros_like(m), m, v, g, *numbers), (state.mu, state.nu), means
        )
        state = state._replace(mu=mu, nu=nu, token=token)
        if self.warmup is not None:
            return found, state
        at, norms, token = jax.lax.cond(
            (state.count + 1) % EVERY == 0, partial(self._compared, scales[1], state),
            lambda: (state.frozen_at, state.norms, token),
        )  # fmt: skip
        return found, state._replace(frozen_at=at, norms=norms, token=token)

    def _compared(self, scale: Any, state: OnebitAdamState) -> tuple[Any, Any, Any]:
        """Whether this step ends the warm-up, by the norm of v; ``frozen_at``, ``norms`` and ``token`` after it."""
        now = state.count + 1
        norm = sum((v.sum() for v in jax.tree_util.tree_leaves(state.nu)), jnp.float32(0)) * scale
        norms = jnp.append(state.norms[1:], norm)

        def agree(token: Any) -> tuple[Any, Any]:
            here = jnp.asarray(settled(norms[0], norm), jnp.uint8)
            found, token = called(self._agree, {"settled": here}, self.session, token)
            return found["settled"] > 0, token

        full = now // EVERY > norms_between(self.b2)
        ends, token = jax.lax.cond(full, agree, lambda token: (jnp.zeros((), bool), token), state.token)
        return jnp.where(ends, now, 0), norms, token

    def _agree(self, arrays: dict[str, np.ndarray]) -> None:
        arrays["settled"][...] = settled_everywhere(self.session, bool(arrays["settled"]))

    def _compressed(self, state: OnebitAdamState, scales: Any, grads: Any) -> tuple[Any, OnebitAdamState]:
        """The same with the mean of the momenta, and a variance that stays."""
        step, sent = frozen_adam(jnp.sqrt, jnp.clip), momenta(grads, state.mu, self.b1)
        means, token = averaged_tree(sent, self.session, False, state.token)
        numbers = (-1.0, *scales, self.eps, 0.0)

        def of_parameter(m: Any, v: Any, typical: Any, mean: Any) -> Any:
            return step(jnp.zeros_like(m), m, v, mean, *numbers, typical, self.clip)

        found, mu = mapped(2, of_parameter, (state.mu, state.nu, typical_variances(state.nu)), means)
        return found, state._replace(mu=mu, token=token)


def momenta(grads: Any, mu: Any, first: float) -> Any:
    """What a rank sends: β₁ m + (1 - β₁) g."""
    message = momentum(jnp.sqrt)
    return mapped(1, lambda g, m: (message(g, m, first, 1 - first),), (grads,), mu)[0]


def compressed_trace(
    session: Session | None = None, *, decay: float = 0.9, nesterov: bool = False, warmup: int = 0
) -> Any:
    """SGD with synchronised momenta (``espresso_mpi.optim.MomentumSGD``) in the place of ``optax.trace``.

    It synchronises by itself: pass the gradients of this rank. Its calls are ordered by its state, as those of
    ``synchronize``.

    Args:
        session: as for ``sync``; its compressor is that of the momenta.
        decay: μ.
        nesterov, warmup: as for ``MomentumSGD``.

    Raises:
        ConfigError: as ``scale_by_onebit_adam``.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = optax.chain(  # doctest: +SKIP
        ...     espresso_mpi.jax.compressed_trace(session), optax.scale_by_learning_rate(0.1)
        ... )
    """
    owner = "compressed_trace"
    optax = optax_for(owner, "use espresso_mpi.optim.MomentumSGD")
    SGDSettings.checked(owner, 0.0, decay, 0.0, nesterov)
    chosen = usable(owner, session, "sgd-momentum")
    made = _Trace(chosen, decay, nesterov, steps(owner, "warmup", warmup, 0), GradientMeans("MomentumSGD", chosen))
    return optax.GradientTransformation(made.start, made.update)


@dataclass(frozen=True, eq=False)
class _Trace:
    """The functions of ``compressed_trace``."""

    session: Session
    decay: float
    nesterov: bool
    warmup: int
    gradient_means: GradientMeans

    def start(self, params: Any) -> TraceState:
        return TraceState(counter(), zeros(params), counter())

    def update(self, updates: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        one_chain(self, self.session)
        means, token = jax.lax.cond(
            state.count < self.warmup, partial(self._dense, state), partial(self._compressed, state), single(updates)
        )
        move, numbers = sgd(jnp.sqrt), (-1.0, 1 + self.decay, self.decay) if self.nesterov else (-1.0, 1.0, 0.0)
        found, trace = mapped(2, lambda m, mean: move(jnp.zeros_like(m), m, mean, *numbers), (state.trace,), means)
        return like(found, updates), TraceState(state.count + 1, trace, token)

    def _dense(self, state: TraceState, grads: Any) -> tuple[Any, Any]:
        means, token = averaged_tree(grads, self.session, False, state.token, self.gradient_means)
        return self._momenta(means, state.trace), token

    def _compressed(self, state: TraceState, grads: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = averaged_tree(self._momenta(grads, state.trace), self.session, False, state.token)
        return found

    def _momenta(self, grads: Any, trace: Any) -> Any:
        message = decayed_momentum(jnp.sqrt)
        return mapped(1, lambda g, m: (message(g, m, 0.0, self.decay, 0.0),), (grads,), trace)[0]


def scale_by_demo(session: Session | None = None, *, sign: bool = True) -> Any:
    """DeMo (``espresso_mpi.optim.DeMo``) before weight decay and learning rate.

    It synchronises by itself: pass the gradients of this rank. Its calls are ordered by its state, as those of
    ``synchronize``.

    Args:
        session: as for ``sync``, with ``compressor="dct_topk:…"`` and ``feedback="plain:decay=0.999"``.
        sign: as for ``DeMo``.

    Raises:
        ConfigError: as ``scale_by_onebit_adam``, or the session has no plain error feedback.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = optax.chain(  # doctest: +SKIP
        ...     espresso_mpi.jax.scale_by_demo(session), optax.scale_by_learning_rate(1e-3)
        ... )
    """
    owner = "scale_by_demo"
    optax = optax_for(owner, "use espresso_mpi.optim.DeMo")
    DeMoSettings.checked(owner, 0.0, 0.0, sign)
    chosen = usable(owner, session, "adam")
    require_residuals(owner, chosen)
    made = _DeMo(chosen, sign)
    return optax.GradientTransformation(made.start, made.update)


@dataclass(frozen=True, eq=False)
class _DeMo:
    """The functions of ``scale_by_demo``."""

    session: Session
    sign: bool

    def start(self, params: Any) -> DeMoState:
        return DeMoState(counter())

    def update(self, updates: Any, state: DeMoState, params: Any = None) -> tuple[Any, DeMoState]:
        one_chain(self, self.session)
        found, token = averaged_tree(single(updates), self.session, False, state.token)
        along = jax.tree_util.tree_map(jnp.sign, found) if self.sign else found
        return like(along, updates), DeMoState(token)
