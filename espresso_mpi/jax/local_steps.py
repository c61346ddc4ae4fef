"""DiLoCo and SparseLoCo for optax: local steps of any optimizer, then an outer step along the mean of what they led to.

The state holds the anchor, as that of ``zero_one_adam``. May import: JAX and the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from ..errors import ConfigError
from ..optim.diloco import intervals, own_share, parts, phase, require_plain
from ..optim.formulas import outer, progress
from ..optim.settings import SGDSettings
from ..session import Session
from .arguments import given_params, optax_for, schedule, steps, usable
from .trees import averaged_tree, copied, counter, difference, like, mapped, one_chain, precise, single, zeros
from .under_way import UnderWay


class DiLoCoState(NamedTuple):
    """The state of ``diloco``.

    Attributes:
        count: number of local steps so far, an int32.
        inner: the state of the inner optimizer.
        anchor: the parameters of the last average, at least float32.
        velocity: u, float32.
        averaged: of each fragment, the number of local steps before its last average; -1 if its parameters have kept a
            share of their own in it; int32.
        token: number of synchronisations so far, which orders them; see ``after`` of ``sync``.
        under: with a delay, of each fragment, the number of its message under way; 0: there is none; int32. The message
            itself is not in the state, and its number means nothing to another process.
    """

    count: Any
    inner: Any
    anchor: Any
    velocity: Any
    averaged: Any
    token: Any
    under: Any = None


def diloco(
    inner: Any,
    session: Session | None = None,
    *,
    every: int = 30,
    learning_rate: Any = 0.7,
    momentum: float = 0.6,
    nesterov: bool = True,
    fragments: int = 1,
    delay: int = 0,
    mix: float | None = None,
) -> Any:
    """DiLoCo (``espresso_mpi.optim.DiLoCo``; Douillard et al., 2023) around an optimizer of optax.

    The inner optimizer gets the gradients of this rank, which are not synchronised. In every H-th step, the ranks
    average by how far their parameters have moved from the anchor, and take the outer step along this mean. Its calls
    are ordered by its state, as those of ``synchronize``. Nothing may follow it in a chain, and nothing else may change
    the parameters. All ranks must start from the same ones, and differ between two averages. ``update`` with
    ``average=True`` averages at once, as that of ``zero_one_adam``. If a parameter is not finite on a rank, the next
    average is an error on all.

    With ``delay``, a message is a copy that travels while the next steps run; the step in which it is due waits for it
    and raises its errors. A state with a message under way can only be continued by this transformation, in this
    process; else all ranks raise a StateError. Save states of ``average=True``, which ends what is under way.

    Args:
        inner: the local optimizer, with its learning rate; it gets the other arguments of ``update``. With
            ``optax.contrib.muon``, this is MuLoCo.
        session: as for ``sync``; ``compressor="int4"`` is usual.
        every: H, the number of local steps.
        learning_rate: η of the outer step, or a schedule of the number of local steps before this one.
        momentum, nesterov, fragments, delay, mix: as for ``DiLoCo``. Neighbours in the tree form a fragment.

    Raises:
        ConfigError: as ``scale_by_onebit_lamb``, or an update gets a state of other options.

    Example:
        >>> optimizer = espresso_mpi.jax.diloco(optax.adamw(1e-3), session, every=30, delay=5)  # doctest: +SKIP
    """
    owner, optax = "diloco", optax_for("diloco", "use espresso_mpi.optim.DiLoCo")
    if not isinstance(inner, optax.GradientTransformation):
        raise ConfigError(f"{owner}: inner={inner!r}; expected an optimizer of optax, such as optax.adamw(1e-3)")
    every, fragments, delay = intervals(owner, every, fragments, delay)
    chosen, every = usable(owner, session, None), steps(owner, "every", every, 1)
    settings, rate = SGDSettings.checked(owner, 0.0, momentum, 0.0, nesterov), schedule(owner, learning_rate)
    made = _DiLoCo(
        owner, optax.with_extra_args_support(inner), optax.apply_updates, chosen, every, fragments, delay,
        own_share(owner, mix, delay), rate, settings, UnderWay(owner, chosen),
    )  # fmt: skip
    return optax.GradientTransformationExtraArgs(made.start, made.update)


def sparseloco(
    inner: Any,
    session: Session | None = None,
    *,
    every: int = 30,
    learning_rate: Any = 2.0,
    fragments: int = 1,
    delay: int = 0,
) -> Any:
    """SparseLoCo (``espresso_mpi.optim.DiLoCo.sparse``; Sarfi et al., 2025) around an optimizer of optax.

    ``diloco`` without an outer momentum: the error feedback of the session takes its place.

    Args:
        inner, every, learning_rate, fragments, delay: as for ``diloco``.
        session: as for ``sync``; usual are ``compressor="topk_in_chunks:chunk=4096,k=64,values=int2"`` and
            ``feedback="plain:decay=0.95"``.

    Raises:
        ConfigError: the feedback of the session is not ``plain``; others as for ``diloco``.

    Example:
        >>> optimizer = espresso_mpi.jax.sparseloco(optax.adamw(1e-3), session, every=30)  # doctest: +SKIP
    """
    owner = "sparseloco"
    optax_for(owner, "use espresso_mpi.optim.DiLoCo.sparse")
    chosen = usable(owner, session, None)
    require_plain(owner, chosen)
    return diloco(
        inner, chosen, every=every, learning_rate=learning_rate, momentum=0.0, fragments=fragments, delay=delay
    )


@dataclass(frozen=True, eq=False)
class _DiLoCo:
    """The functions of ``diloco``."""

    owner: str
    inner: Any
    apply: Callable[[Any, Any], Any]
    session: Session
    every: int
    fragments: int
    delay: int
    mix: float
    learning_rate: Callable[[Any], Any]
    settings: SGDSettings
    messages: UnderWay

    def start(self, params: Any) -> DiLoCoState:
        averaged = jnp.zeros(len(self._parts(params)), jnp.int32)
        under = jnp.zeros_like(averaged) if self.delay else None
        return DiLoCoState(
            counter(), self.inner.init(params), copied(precise(params)), zeros(params), averaged, counter(), under
        )

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
        self._require_fit(state, len(fragments))
        if average:
            target, state = self._all_averaged(fragments, before, state)
            return like(difference(target, before), params), state
        moved, inner = self.inner.update(updates, state.inner, params, **others)
        lr, state = self.learning_rate(state.count), state._replace(count=state.count + 1, inner=inner)
        target = precise(self.apply(params, moved))
        changed = [jnp.zeros((), bool)] * len(jax.tree_util.tree_leaves(before))
        for number, fragment in enumerate(fragments):
            now, target, state = self._in_turn(number, fragment, len(fragments), lr, target, state)
            changed = [now if index in fragment else other for index, other in enumerate(changed)]
        led, shape = jax.tree_util.tree_flatten(like(difference(target, before), params))
        alone = shape.flatten_up_to(moved)  # as the inner optimizer returned it, to the bit
        found = [jnp.where(*chosen) for chosen in zip(changed, led, alone)]
        return like(jax.tree_util.tree_unflatten(shape, found), params), state

    def _require_fit(self, state: DiLoCoState, fragments: int) -> None:
        if state.averaged.shape != (fragments,):
            raise ConfigError(
                f"{self.owner}: the state is of {state.averaged.size} fragments; expected {fragments}; continue with "
                f"fragments={state.averaged.size}"
            )
        if (state.under is None) == bool(self.delay):
            got, way = ("without a delay", "jax.numpy.zeros_like(state.averaged)") if self.delay else (
                "with a delay", "None, if nothing is under way"
            )  # fmt: skip
            raise ConfigError(
                f"{self.owner}: the state is of a transformation {got}, but delay={self.delay}; expected one of this "
                f"transformation; continue with another delay, or with state._replace(under=…) of {way}"
            )

    def _in_turn(
        self, number: int, fragment: Sequence[int], of: int, lr: Any, local: Any, state: DiLoCoState
    ) -> tuple[Any, Any, DiLoCoState]:
        """What a step does with a fragment: whether it changes its parameters, and parameters and state after it."""
        turn = phase(self.every, number, of)
        leaves = state.count % self.every == turn
        if not self.delay:
            average = partial(self._averaged, number, fragment, lr, self.mix)
            return leaves, *_if(leaves, average, local, state)
        under = state.under[number] != 0
        due = under & (((state.count - self.delay) % self.every == turn) | leaves)  # of other intervals: at the latest
        local, state = _if(due, partial(self._received, number, fragment, lr), local, state)
        sent = partial(self._sent, fragment, local, state)
        message, token = jax.lax.cond(leaves, sent, lambda: (state.under[number], state.token))
        return due, local, state._replace(under=state.under.at[number].set(message), token=token)

    def _all_averaged(
        self, fragments: Sequence[Sequence[int]], local: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """The parameters and the state after all that is under way, and the averages of what has moved since."""
        lr = self.learning_rate(state.count)
        for number, fragment in enumerate(fragments):
            if self.delay:
                received = partial(self._received, number, fragment, lr)
                local, state = _if(state.under[number] != 0, received, local, state)
            moved = state.averaged[number] != state.count
            local, state = _if(moved, partial(self._averaged, number, fragment, lr, 0.0), local, state)
        return local, state

    def _averaged(
        self, number: int, fragment: Sequence[int], lr: Any, mix: float, local: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """After the average of a fragment at once."""
        means, token = averaged_tree(self._progress(fragment, local, state), self.session, False, state.token)
        return self._outer(number, fragment, lr, mix, means, local, state._replace(token=token))

    def _sent(self, fragment: Sequence[int], local: Any, state: DiLoCoState) -> tuple[Any, Any]:
        """The number of a fragment's message, which has left, and the next token."""
        return self.messages.push(self._progress(fragment, local, state), state.token)

    def _received(
        self, number: int, fragment: Sequence[int], lr: Any, local: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """After the average of the fragment whose message is under way."""
        shaped = zeros(only(fragment, state.anchor))
        means, token = self.messages.wait(shaped, state.under[number], state.token)
        state = state._replace(under=state.under.at[number].set(0), token=token)
        return self._outer(number, fragment, lr, self.mix, means, local, state)

    def _progress(self, fragment: Sequence[int], local: Any, state: DiLoCoState) -> Any:
        """What a rank sends: how far a fragment has moved from its anchor."""
        message, anchor, x = progress(jnp.sqrt), only(fragment, state.anchor), only(fragment, local)
        return single(mapped(1, lambda anchor, x: (message(None, anchor, x),), (anchor,), x)[0])

    def _outer(
        self, number: int, fragment: Sequence[int], lr: Any, mix: float, means: Any, local: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """The parameters after the step of a fragment along the mean of its progress, from its anchor."""
        formula, inertia = outer(jnp.sqrt), self.settings.momentum
        direct, ahead = (1.0, inertia) if self.settings.nesterov else (0.0, 1.0)
        anchor, velocity, x = (only(fragment, tree) for tree in (state.anchor, state.velocity, local))

        def of_parameter(anchor: Any, u: Any, x: Any, d: Any) -> Any:
            return formula(x if mix else anchor, anchor, u, d, lr, inertia, direct, ahead, mix, 1 - mix)

        x, anchor, velocity = mapped(3, of_parameter, (anchor, velocity, x), means)
        kept = state._replace(
            anchor=instead(anchor, state.anchor), velocity=instead(velocity, state.velocity),
            averaged=state.averaged.at[number].set(-1 if mix else state.count),
        )  # fmt: skip
        return instead(x, local), kept


def _if(
    due: Any, act: Callable[[Any, DiLoCoState], tuple[Any, DiLoCoState]], local: Any, state: DiLoCoState
) -> tuple[Any, DiLoCoState]:
    """The parameters and the state after an action, or as they are."""
    found: tuple[Any, DiLoCoState] = jax.lax.cond(due, act, lambda local, state: (local, state), local, state)
    return found


def only(fragment: Sequence[int], tree: Any) -> Any:
    """The tree with None for all leaves but those of these numbers."""
    leaves, shape = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(shape, [leaf if i in fragment else None for i, leaf in enumerate(leaves)])


def instead(new: Any, old: Any) -> Any:
    """The leaves of a tree, and those of another one where it has None."""
    return jax.tree_util.tree_map(lambda x, y: y if x is None else x, new, old, is_leaf=lambda x: x is None)
