"""0/1 Adam for optax: ranks move alone in some steps, and go to where the mean of their momenta leads.

The state holds an anchor: the parameters of the last synchronisation, which all ranks share to the bit. The update of
a synchronisation leads from the parameters of the rank to the new anchor. Adding it can round, but the next one starts
at the anchor again. May import: JAX and the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from ..optim.formulas import adam, from_anchor, frozen_adam, local_adam, mean_momentum
from ..optim.rules import GradientMeans
from ..optim.settings import AdamSettings, update_clip_of
from ..optim.zero_one_adam import Policy, grown
from ..session import Session
from .arguments import decays, given_params, optax_for, schedule, steps, unbiased, usable
from .optimizers import momenta
from .trees import (
    averaged_tree,
    copied,
    counter,
    difference,
    like,
    mapped,
    numbers,
    one_chain,
    precise,
    single,
    typical_variances,
    zeros,
)


class ZeroOneAdamState(NamedTuple):
    """The state of ``zero_one_adam``.

    Attributes:
        count: number of updates so far, an int32.
        updates, next_update: number of updates of the variance, and the step of the next one; 0: there is none.
        synced_at: the last step that synchronised.
        mu, nu: moments, float32, as the parameters; mu is that of the rank between synchronisations.
        anchor: the parameters of the last synchronisation, at least float32.
        moved: the sum of the momenta since, each times its rate.
        lengths, kept: of each parameter, the sum of these rates, and the share of the anchor that weight decay has
            left; float32 numbers.
        spoilt: whether a gradient of this rank was not finite in a local step since the last synchronisation. The next
            one raises the error on all ranks. As the state of before remains then, the error comes again, until all
            ranks set ``optax.tree_utils.tree_set(state, spoilt=jax.numpy.zeros((), bool))``.
        token: number of synchronisations so far, which orders them; see ``after`` of ``sync``.
    """

    count: Any
    updates: Any
    next_update: Any
    synced_at: Any
    mu: Any
    nu: Any
    anchor: Any
    moved: Any
    lengths: Any
    kept: Any
    spoilt: Any
    token: Any


def zero_one_adam(
    learning_rate: Any,
    session: Session | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Any = None,
    warmup: int,
    kappa: int = 16,
    double_every: int | None = None,
    longest: int = 16,
    warmup_compressor: str = "auto",
    update_clip: float | None = None,
) -> Any:
    """0/1 Adam (``espresso_mpi.optim.ZeroOneAdam``; Lu et al., ICLR 2023), a whole optimizer for optax.

    It synchronises by itself: pass the gradients of this rank, and the parameters. Its calls are ordered by its state,
    as those of ``synchronize``. Nothing may follow it in a chain, and nothing else may change the parameters: a
    synchronisation goes back to where the local steps began.

    The ranks' parameters differ between local steps. ``update(grads, state, params, average=True)``, with a Python
    bool, does not use the gradients, and makes the parameters equal: the state's ``anchor`` to the bit, the parameters
    but for the rounding of the sum with the update.

    Args:
        learning_rate: η, or a schedule of optax.
        session: as for ``sync``; its compressor is that of the momenta.
        b1, b2, eps, weight_decay: β₁, β₂, ε and λ, decoupled from the gradient.
        mask: as for ``scale_by_onebit_lamb``. warmup_compressor: as for ``scale_by_onebit_adam``.
        warmup, kappa, double_every, longest, update_clip: as for ``ZeroOneAdam``.

    Raises:
        ConfigError: optax is missing, an argument is not valid, the session would skip values that are not finite, or
            an update gets no parameters. Errors of a synchronisation as for ``sync``.

    Example:
        >>> optimizer = espresso_mpi.jax.zero_one_adam(1e-3, session, warmup=1000)  # doctest: +SKIP
    """
    owner = "zero_one_adam"
    optax = optax_for(owner, "use espresso_mpi.optim.ZeroOneAdam")
    numbers_ = {"warmup": warmup, "kappa": kappa, "double_every": double_every, "longest": longest}
    checked = {key: value if value is None else steps(owner, key, value, 1) for key, value in numbers_.items()}
    policy = Policy.checked(owner, **checked)
    settings, chosen = AdamSettings.checked(owner, 0.0, (b1, b2), eps, weight_decay), usable(owner, session)
    means = GradientMeans("ZeroOneAdam", chosen, warmup_compressor)
    clip, rate = update_clip_of(owner, update_clip), schedule(owner, learning_rate)
    made = _ZeroOneAdam(owner, chosen, rate, settings, mask, policy, means, clip)
    return optax.GradientTransformationExtraArgs(made.start, made.update)


@dataclass(frozen=True)
class _Step:
    """What a step of 0/1 Adam is given.

    Attributes:
        grads, params: trees of arrays of at least float32.
        number: of the step, from 1.
        lr: η.
        decays: λ of each parameter.
        new: whether the gradients count.
    """

    grads: Any
    params: Any
    number: Any
    lr: Any
    decays: Any
    new: bool = True


@dataclass(frozen=True, eq=False)
class _ZeroOneAdam:
    """The functions of ``zero_one_adam``."""

    owner: str
    session: Session
    learning_rate: Callable[[Any], Any]
    settings: AdamSettings
    mask: Any
    policy: Policy
    gradient_means: GradientMeans
    clip: float

    def start(self, params: Any) -> ZeroOneAdamState:
        return ZeroOneAdamState(
            counter(), counter(), counter() + 1, counter(), zeros(params), zeros(params), copied(precise(params)),
            zeros(params), numbers(params, 0.0), numbers(params, 1.0), jnp.zeros((), bool), counter(),
        )  # fmt: skip

    def update(
        self, updates: Any, state: ZeroOneAdamState, params: Any = None, *, average: bool = False, **_: Any
    ) -> tuple[Any, ZeroOneAdamState]:
        one_chain(self, self.session)
        x = precise(given_params(self.owner, params))
        each_decay = decays(self.owner, self.settings.weight_decay, self.mask, params)
        if average:
            step = _Step(zeros(params), x, state.count, 0.0, each_decay, new=False)
            branches = [self._unmoved, self._after_local]
            which = (state.synced_at < state.count).astype(jnp.int32)
        else:
            number = state.count + 1
            step = _Step(single(updates), x, number, self.learning_rate(state.count), each_decay)
            branches = [self._variance, self._local, self._at_anchor, self._after_local]
            waits = number - state.synced_at < self.policy.interval(number, jnp)
            which = jnp.where(waits, 1, jnp.where(state.synced_at == state.count, 2, 3))
            which = jnp.where(number == state.next_update, 0, which)
        target, state = jax.lax.switch(which, [partial(branch, step) for branch in branches], state)
        return like(difference(target, x), params), state

    def _unmoved(self, step: _Step, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """Nothing to average."""
        return step.params, state

    def _variance(self, step: _Step, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """AdamW's step on the mean of the gradients."""
        means, token = averaged_tree(step.grads, self.session, False, state.token, self.gradient_means)
        updates, (first, second), formula = state.updates + 1, self.settings.betas, adam(jnp.sqrt)
        rates = first, 1 - first, second, 1 - second, step.lr, unbiased(first, step.number), unbiased(second, updates)

        def of_parameter(x: Any, m: Any, v: Any, decay: Any, typical: Any, g: Any) -> Any:
            return formula(x, m, v, g, *rates, self.settings.eps, decay, typical)

        trees = state.anchor, state.mu, state.nu, step.decays, typical_variances(state.nu)
        x, mu, nu = mapped(3, of_parameter, trees, means)
        after = self.policy.update_after(step.number, updates, jnp)
        return x, state._replace(
            count=step.number, updates=updates, next_update=after, synced_at=step.number, mu=mu, nu=nu, anchor=x,
            token=token,
        )  # fmt: skip

    def _local(self, step: _Step, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """A step of this rank alone. A gradient that is not finite changes nothing of its parameter."""
        first, formula = self.settings.betas[0], local_adam(jnp.sqrt, jnp.clip)
        rate = step.lr * unbiased(first, step.number)

        def of_parameter(
            x: Any, m: Any, u: Any, v: Any, decay: Any, typical: Any, length: Any, kept: Any, g: Any
        ) -> tuple[Any, ...]:
            shrink, finite = 1 - step.lr * decay, jnp.isfinite(g).all()
            numbers_ = first, 1 - first, rate, self._v_scale(state), self.settings.eps, shrink, typical, self.clip
            found = formula(x, m, u, v, g, *numbers_)
            moved = [jnp.where(finite, new, old) for new, old in zip(found, (x, m, u))]
            return *moved, *grown(length, kept, rate, shrink), finite

        settled = state.nu, step.decays, typical_variances(state.nu)
        trees = step.params, state.mu, state.moved, *settled, state.lengths, state.kept
        x, mu, moved, lengths, kept, finite = mapped(6, of_parameter, trees, step.grads)
        spoilt = state.spoilt | ~jnp.asarray(jax.tree_util.tree_leaves(finite), bool).all()
        return x, state._replace(count=step.number, mu=mu, moved=moved, lengths=lengths, kept=kept, spoilt=spoilt)

    def _at_anchor(self, step: _Step, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """A synchronisation that no local step precedes."""
        first, formula = self.settings.betas[0], frozen_adam(jnp.sqrt, jnp.clip)
        means, token = averaged_tree(momenta(step.grads, state.mu, first), self.session, False, state.token)
        m_scale = unbiased(first, step.number)
        rates = step.lr, m_scale, self._v_scale(state), self.settings.eps

        def of_parameter(x: Any, m: Any, v: Any, decay: Any, typical: Any, mean: Any) -> Any:
            return formula(x, m, v, mean, *rates, decay, typical, self.clip * m_scale)

        trees = state.anchor, state.mu, state.nu, step.decays, typical_variances(state.nu)
        x, mu = mapped(2, of_parameter, trees, means)
        return x, state._replace(count=step.number, synced_at=step.number, mu=mu, anchor=x, token=token)

    def _after_local(self, step: _Step, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """The end of local steps, of which this is the last one; for an average, with a learning rate of zero."""
        message, formula = mean_momentum(jnp.sqrt), from_anchor(jnp.sqrt, jnp.clip)
        first, rest = self.settings.betas[0] if step.new else 1.0, 1 - self.settings.betas[0]
        rate = step.lr * unbiased(self.settings.betas[0], step.number)

        def sent_of(m: Any, u: Any, decay: Any, length: Any, kept: Any, g: Any) -> tuple[Any, ...]:
            shrink = 1 - step.lr * decay
            length, kept = grown(length, kept, rate, shrink)
            moved = length > 0  # else the rates were zero, and u has no share of the momentum of this rank
            numbers_ = jnp.where(moved, rate, 1), jnp.where(moved, shrink, 0), 1 / jnp.where(moved, length, 1)
            return message(g, m, u, first, rest, *numbers_), length, kept

        trees = state.mu, state.moved, step.decays, state.lengths, state.kept
        sent, lengths, kept = mapped(3, sent_of, trees, step.grads)
        means, token = averaged_tree(spoilt_tree(sent, state.spoilt), self.session, False, state.token)

        def of_parameter(x: Any, m: Any, v: Any, length: Any, kept: Any, typical: Any, mean: Any) -> Any:
            return formula(x, m, x, v, mean, length, self._v_scale(state), self.settings.eps, kept, typical, self.clip)

        settled = state.nu, lengths, kept, typical_variances(state.nu)
        x, mu = mapped(2, of_parameter, (state.anchor, state.mu, *settled), means)
        return x, state._replace(
            count=step.number, synced_at=step.number, mu=mu, anchor=x, moved=zeros(sent), lengths=numbers(sent, 0.0),
            kept=numbers(sent, 1.0), spoilt=jnp.zeros((), bool), token=token,
        )  # fmt: skip

    def _v_scale(self, state: ZeroOneAdamState) -> Any:
        return unbiased(self.settings.betas[1], state.updates)


def spoilt_tree(sent: Any, spoilt: Any) -> Any:
    """The tree with a NaN if so, for which the session raises its error on every rank."""
    leaves, shape = jax.tree_util.tree_flatten(sent)
    for index, leaf in enumerate(leaves):
        if leaf.size:
            leaves[index] = jnp.where(spoilt, jnp.nan, leaf)
            break
    return jax.tree_util.tree_unflatten(shape, leaves)
