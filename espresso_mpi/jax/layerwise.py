"""1-bit LAMB and CLAN for optax: the norm of each parameter scales its step. May import: JAX and the package.

Their arithmetic is that of ``espresso_mpi.optim``. Norms are float32 sums of values that are scaled to at most 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from ..optim.clan import lans
from ..optim.formulas import frozen_direction, lamb_direction
from ..optim.onebit_lamb import KEEP, bounded, checked_range, root_ratios
from ..optim.rules import GradientMeans
from ..optim.settings import AdamSettings
from ..session import Session
from .arguments import decays, given_params, optax_for, steps, unbiased, usable
from .optimizers import momenta
from .trees import averaged_tree, counter, like, mapped, numbers, one_chain, single, typical_variances, zeros


class OnebitLambState(NamedTuple):
    """The state of ``scale_by_onebit_lamb``.

    Attributes:
        count: number of updates so far, an int32.
        mu, nu, fresh: m, v and the variance v' that corrects the frozen one; float32, as the parameters.
        coefficients, factors: of each parameter, the mean of its coefficients in the warm-up and the last factor;
            float32 numbers.
        token: number of synchronisations so far, which orders them; see ``after`` of ``sync``.
    """

    count: Any
    mu: Any
    nu: Any
    fresh: Any
    coefficients: Any
    factors: Any
    token: Any


class ClanState(NamedTuple):
    """The state of ``scale_by_clan``: number of updates, an int32, and moments, float32, as the parameters."""

    count: Any
    mu: Any
    nu: Any


def scale_by_onebit_lamb(
    session: Session | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Any = None,
    warmup: int,
    warmup_compressor: str = "auto",
    coefficients: tuple[float, float] = (0.01, 10.0),
) -> Any:
    """1-bit LAMB (``espresso_mpi.optim.OnebitLamb``; Li et al., arXiv 2104.06069); the learning rate follows it.

    It synchronises by itself: pass the gradients of this rank, and the parameters. Its calls are ordered by its state,
    as those of ``synchronize``. Weight decay is an argument, as the norm of the step includes it. The parameters of the
    ranks stay equal to the bit only if their devices are of one kind, with as many threads.

    Args:
        session: as for ``sync``; its compressor is that of the momenta.
        b1, b2, eps, weight_decay: β₁, β₂, ε and λ.
        mask: where weight decay applies, as for ``optax.adamw``: a tree of booleans in the structure of the parameters,
            or a function that makes it of them. Default: everywhere.
        warmup: number of first updates, which are LAMB's. The learning rate should have reached its peak by then.
        warmup_compressor: spec of the compressor of gradients in the warm-up, with error feedback. ``"auto"``:
            ``"int8"`` with ``Session(plan="auto")``, ``"none"`` with other sessions.
        coefficients: the smallest and the largest ratio of the norms of a parameter and its step.

    Raises:
        ConfigError: optax is missing, an argument is not valid, the session would skip values that are not finite, or
            an update gets no parameters. Errors of a synchronisation as for ``sync``.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = optax.chain(  # doctest: +SKIP
        ...     espresso_mpi.jax.scale_by_onebit_lamb(session, warmup=1000), optax.scale_by_learning_rate(1e-2)
        ... )
    """
    owner = "scale_by_onebit_lamb"
    optax = optax_for(owner, "use espresso_mpi.optim.OnebitLamb")
    settings = AdamSettings.checked(owner, 0.0, (b1, b2), eps, weight_decay)
    bounds, chosen = checked_range(owner, coefficients), usable(owner, session)
    means = GradientMeans("OnebitLamb", chosen, warmup_compressor)
    made = _OnebitLamb(owner, chosen, settings, mask, steps(owner, "warmup", warmup, 1), bounds, means)
    return optax.GradientTransformation(made.start, made.update)


@dataclass(frozen=True, eq=False)
class _OnebitLamb:
    """The functions of ``scale_by_onebit_lamb``."""

    owner: str
    session: Session
    settings: AdamSettings
    mask: Any
    warmup: int
    bounds: tuple[float, float]
    gradient_means: GradientMeans

    def start(self, params: Any) -> OnebitLambState:
        return OnebitLambState(
            counter(),
            zeros(params),
            zeros(params),
            zeros(params),
            numbers(params, 0.0),
            numbers(params, 1.0),
            counter(),
        )

    def update(self, updates: Any, state: OnebitLambState, params: Any = None) -> tuple[Any, OnebitLambState]:
        x = single(given_params(self.owner, params))
        one_chain(self, self.session)
        each_decay = decays(self.owner, self.settings.weight_decay, self.mask, params)
        dense, compressed = (partial(stage, state, each_decay) for stage in (self._dense, self._compressed))
        found, state = jax.lax.cond(state.count < self.warmup, dense, compressed, single(updates), x)
        return like(found, updates), state

    def _dense(self, state: OnebitLambState, each_decay: Any, grads: Any, params: Any) -> tuple[Any, OnebitLambState]:
        """LAMB's step on the mean of the gradients."""
        now, (first, second), eps = state.count + 1, self.settings.betas, self.settings.eps
        means, token = averaged_tree(grads, self.session, False, state.token, self.gradient_means)
        rates = first, 1 - first, second, 1 - second, unbiased(first, now), unbiased(second, now), eps
        formula = lamb_direction(jnp.sqrt)

        def of_parameter(m: Any, v: Any, x: Any, decay: Any, mean: Any, g: Any) -> tuple[Any, ...]:
            direction, m, v = formula(g, m, v, x, *rates, decay)
            coefficient = trust_ratio(x, direction, *self.bounds)
            return coefficient * direction, m, v, KEEP * mean + (1 - KEEP) * coefficient

        trees = state.mu, state.nu, params, each_decay, state.coefficients
        found, mu, nu, coefficients = mapped(4, of_parameter, trees, means)
        return found, OnebitLambState(now, mu, nu, nu, coefficients, state.factors, token)

    def _compressed(
        self, state: OnebitLambState, each_decay: Any, grads: Any, params: Any
    ) -> tuple[Any, OnebitLambState]:
        """A step along the mean of the momenta, with the coefficients of the warm-up and their factors."""
        now, (first, second), eps = state.count + 1, self.settings.betas, self.settings.eps
        means, token = averaged_tree(momenta(grads, state.mu, first), self.session, False, state.token)
        v_scale, fresh_scale = unbiased(second, self.warmup), unbiased(second, now)
        rates = first, 1 / (1 - first), second, 1 - second, unbiased(first, now), v_scale, eps
        formula, scale = frozen_direction(jnp.sqrt), 1 / (1 - KEEP**self.warmup)

        def of_parameter(
            m: Any, fresh: Any, v: Any, x: Any, decay: Any, typical: Any, coefficient: Any, factor: Any, mean: Any
        ) -> tuple[Any, ...]:
            direction, m, fresh = formula(mean, m, fresh, v, x, *rates, decay, typical)
            ratios = root_ratios(jnp.sqrt, v, fresh, v_scale, fresh_scale, eps)
            factor = bounded(jnp.max(ratios, initial=0), factor, jnp.clip)  # the initial is for empty arrays
            return factor * coefficient * scale * direction, m, fresh, factor

        settled = state.nu, params, each_decay, typical_variances(state.nu), state.coefficients
        trees = state.mu, state.fresh, *settled, state.factors
        found, mu, fresh, factors = mapped(4, of_parameter, trees, means)
        return found, OnebitLambState(now, mu, state.nu, fresh, state.coefficients, factors, token)


def scale_by_clan(
    *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01, mask: Any = None
) -> Any:
    """CLAN (``espresso_mpi.optim.Clan``; Zhong et al., 2021): LANS on gradients that are synchronised already.

    It makes no call of a session: put it after ``synchronize``, which raises an error if a gradient is not finite, and
    before the learning rate. Weight decay is an argument, as the norm of the step includes it.

    Args:
        b1, b2, eps, weight_decay: β₁, β₂, ε and λ.
        mask: as for ``scale_by_onebit_lamb``.

    Raises:
        ConfigError: optax is missing, an argument is not valid, or an update gets no parameters.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = optax.chain(  # doctest: +SKIP
        ...     espresso_mpi.jax.synchronize(session),
        ...     espresso_mpi.jax.scale_by_clan(),
        ...     optax.scale_by_learning_rate(1e-3),
        ... )
    """
    owner = "scale_by_clan"
    optax = optax_for(owner, "use espresso_mpi.optim.Clan")
    settings = AdamSettings.checked(owner, 0.0, (b1, b2), eps, weight_decay)

    def start(params: Any) -> ClanState:
        return ClanState(counter(), zeros(params), zeros(params))

    def update(updates: Any, state: ClanState, params: Any = None) -> tuple[Any, ClanState]:
        now, x = state.count + 1, single(given_params(owner, params))
        corrections = [1 / unbiased(beta, now) for beta in settings.betas]

        def of_parameter(m: Any, v: Any, x: Any, decay: Any, g: Any) -> tuple[Any, ...]:
            direction = g / (norm(g) + settings.eps)
            ratio = partial(trust_ratio, x)
            step, m, v = lans(x, direction, m, v, settings.betas, corrections, settings.eps, decay, ratio)
            return step, m, v

        trees = state.mu, state.nu, x, decays(owner, weight_decay, mask, params)
        found, mu, nu = mapped(3, of_parameter, trees, single(updates))
        return like(found, updates), ClanState(now, mu, nu)

    return optax.GradientTransformation(start, update)


def norm(x: Any) -> Any:
    """The Euclidean norm; squares of values that are scaled to at most 1 do not overflow."""
    largest = jnp.max(jnp.abs(x), initial=0)
    return largest * jnp.sqrt(jnp.sum(jnp.square(x / jnp.where(largest > 0, largest, 1))))


def trust_ratio(x: Any, direction: Any, least: float = 0.0, most: float = math.inf) -> Any:
    """How long a parameter is for the direction of its step, within a range; 1 if one of them is zero."""
    length, other = norm(x), norm(direction)
    both = (length > 0) & (other > 0)
    return jnp.where(both, jnp.clip(length / jnp.where(both, other, 1), least, most), 1.0)
