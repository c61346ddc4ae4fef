"""DiLoCo for optax: local steps of any optimizer, then an outer step along the mean of what they led to.

The state holds the anchor, as that of ``zero_one_adam``. May import: JAX and the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from ..errors import ConfigError
from ..optim.diloco import parts, phase
from ..optim.settings import SGDSettings
from ..optim.updates import outer, progress
from ..session import Session
from .arguments import given_params, optax_for, schedule, steps, usable
from .trees import averaged_tree, counter, difference, like, mapped, one_chain, precise, single, zeros


class DiLoCoState(NamedTuple):
    """The state of ``diloco``.

    Attributes:
        count: number of local steps so far, an int32.
        inner: the state of the inner optimizer.
        anchor: the parameters of the last average, at least float32.
        velocity: u, float32.
        averaged: of each fragment, the number of local steps before its last average; int32.
        token: number of synchronisations so far, which orders them; see ``after`` of ``sync``.
    """

    count: Any
    inner: Any
    anchor: Any
    velocity: Any
    averaged: Any
    token: Any


def diloco(
    inner: Any,
    session: Session | None = None,
    *,
    every: int = 30,
    learning_rate: Any = 0.7,
    momentum: float = 0.6,
    nesterov: bool = True,
    fragments: int = 1,
) -> Any:
    """DiLoCo (``espresso_mpi.optim.DiLoCo``; Douillard et al., 2023) around an optimizer of optax.

    The inner optimizer gets the gradients of this rank, which are not synchronised. In every H-th step, the ranks
    average by how far their parameters have moved from the anchor, and take the outer step along this mean. Its calls
    are ordered by its state, as those of ``synchronize``. Nothing may follow it in a chain, and nothing else may change
    the parameters. All ranks must start from the same ones.

    The ranks differ between two averages. ``update(grads, state, params, average=True)``, with a Python bool, averages
    at once, as that of ``zero_one_adam``, and does not use the gradients. If a parameter of a rank is not finite, the
    next average is an error on all ranks.

    The class's ``delay`` is left out: a part in flight is no value of a program. With ``momentum=0``,
    ``learning_rate=1`` and a session with ``feedback="plain:decay=0.95"``, this is SparseLoCo (``DiLoCo.sparse``).

    Args:
        inner: the local optimizer, with its learning rate; it gets the other arguments of ``update``.
        session: as for ``sync``; ``compressor="int4"`` is usual.
        every: H, the number of local steps.
        learning_rate: η of the outer step, or a schedule of the number of local steps before this one.
        momentum, nesterov, fragments: as for ``DiLoCo``. Neighbours in the tree form a fragment.

    Raises:
        ConfigError: optax is missing, an argument is not valid, the session would skip values that are not finite, or
            an update gets no parameters. Errors of a synchronisation as for ``sync``.

    Example:
        >>> import optax  # doctest: +SKIP
        >>> optimizer = espresso_mpi.jax.diloco(optax.adamw(1e-3), session, every=100)  # doctest: +SKIP
    """
    owner = "diloco"
    optax = optax_for(owner, "use espresso_mpi.optim.DiLoCo")
    if not isinstance(inner, optax.GradientTransformation):
        raise ConfigError(f"{owner}: inner={inner!r}; expected an optimizer of optax, such as optax.adamw(1e-3)")
    if steps(owner, "fragments", fragments, 1) > steps(owner, "every", every, 1):
        raise ConfigError(f"{owner}: every={every}, fragments={fragments}; expected at most one fragment in a step")
    made = _DiLoCo(
        owner, optax.with_extra_args_support(inner), optax.apply_updates, usable(owner, session, None), int(every),
        int(fragments), schedule(owner, learning_rate), SGDSettings.checked(owner, 0.0, momentum, 0.0, nesterov),
    )  # fmt: skip
    return optax.GradientTransformationExtraArgs(made.start, made.update)


@dataclass(frozen=True, eq=False)
class _DiLoCo:
    """The functions of ``diloco``."""

    owner: str
    inner: Any
    apply: Callable[[Any, Any], Any]
    session: Session
    every: int
    fragments: int
    learning_rate: Callable[[Any], Any]
    settings: SGDSettings

    def start(self, params: Any) -> DiLoCoState:
        averaged = jnp.zeros(len(self._parts(params)), jnp.int32)
        return DiLoCoState(counter(), self.inner.init(params), precise(params), zeros(params), averaged, counter())

    def _parts(self, params: Any) -> list[tuple[int, ...]]:
        """The numbers of the leaves of each fragment."""
        leaves = enumerate(jax.tree_util.tree_leaves(params))
        return parts([(index, jnp.size(leaf)) for index, leaf in leaves if jnp.size(leaf)], self.fragments)

    def update(
        self, updates: Any, state: DiLoCoState, params: Any = None, *, average: bool = False, **others: Any
    ) -> tuple[Any, DiLoCoState]:
        one_chain(self, self.session)
        before = precise(given_params(self.owner, params))
        fragments = self._parts(before)
        if state.averaged.shape != (len(fragments),):
            raise ConfigError(
                f"{self.owner}: the state is of {state.averaged.size} fragments; expected {len(fragments)}; continue "
                f"with fragments={state.averaged.size}"
            )
        if average:
            lr, target = self.learning_rate(state.count), before
            for number in range(len(fragments)):
                moved = state.averaged[number] != state.count
                target, state = self._if_due(moved, fragments, number, lr, target, state)
            return like(difference(target, before), params), state
        moved, inner = self.inner.update(updates, state.inner, params, **others)
        lr, state = self.learning_rate(state.count), state._replace(count=state.count + 1, inner=inner)
        target = precise(self.apply(params, moved))
        due = [jnp.zeros((), bool)] * len(jax.tree_util.tree_leaves(before))
        for number, fragment in enumerate(fragments):
            now = state.count % self.every == phase(self.every, number, len(fragments))
            target, state = self._if_due(now, fragments, number, lr, target, state)
            due = [now if index in fragment else other for index, other in enumerate(due)]
        led, shape = jax.tree_util.tree_flatten(like(difference(target, before), params))
        alone = shape.flatten_up_to(moved)  # as the inner optimizer returned it, to the bit
        found = [jnp.where(*chosen) for chosen in zip(due, led, alone)]
        return like(jax.tree_util.tree_unflatten(shape, found), params), state

    def _if_due(
        self, due: Any, fragments: Sequence[Sequence[int]], number: int, lr: Any, local: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """The parameters and the state after the outer step of a fragment, or as they are."""

        def take(local: Any, state: DiLoCoState) -> tuple[Any, DiLoCoState]:
            averaged = state.averaged.at[number].set(state.count)
            return self._outer(fragments[number], lr, local, state._replace(averaged=averaged))

        found: tuple[Any, DiLoCoState] = jax.lax.cond(due, take, lambda local, state: (local, state), local, state)
        return found

    def _outer(self, fragment: Sequence[int], lr: Any, local: Any, state: DiLoCoState) -> tuple[Any, DiLoCoState]:
        """The parameters after the step of a fragment along the mean of its progress, from its anchor."""
        message, formula, inertia = progress(jnp.sqrt), outer(jnp.sqrt), self.settings.momentum
        direct, ahead = (1.0, inertia) if self.settings.nesterov else (0.0, 1.0)
        anchor, velocity, x = (only(fragment, tree) for tree in (state.anchor, state.velocity, local))
        (sent,) = mapped(1, lambda anchor, x: (message(None, anchor, x),), (anchor,), x)
        means, token = averaged_tree(single(sent), self.session, False, state.token)

        def of_parameter(anchor: Any, u: Any, d: Any) -> Any:
            return formula(anchor, anchor, u, d, lr, inertia, direct, ahead, 0.0, 1.0)

        x, anchor, velocity = mapped(3, of_parameter, (anchor, velocity), means)
        kept = state._replace(
            anchor=instead(anchor, state.anchor), velocity=instead(velocity, state.velocity), token=token
        )
        return instead(x, local), kept


def only(fragment: Sequence[int], tree: Any) -> Any:
    """The tree with None for all leaves but those of these numbers."""
    leaves, shape = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(shape, [leaf if i in fragment else None for i, leaf in enumerate(leaves)])


def instead(new: Any, old: Any) -> Any:
    """The leaves of a tree, and those of another one where it has None."""
    return jax.tree_util.tree_map(lambda x, y: y if x is None else x, new, old, is_leaf=lambda x: x is None)
