"""JAX programs: gradients that are averaged inside ``jit``, and transformations for optax.

- ``primitive``: the primitive that averages arrays.
- ``abi``: the C interface of XLA's foreign functions.
- ``trees``: trees of arrays.
- ``arguments``: checks what transformations are given.
- ``optimizers``: 1-bit Adam, SGD with momentum, and DeMo.
- ``layerwise``: 1-bit LAMB and CLAN.
- ``zero_one``, ``local_steps``: 0/1 Adam; DiLoCo and SparseLoCo.
- ``under_way``: messages that travel while steps run.

May import: the public names of ``espresso_mpi``, JAX, and optax where it is asked for. No other folder imports JAX. To
add a transformation for optax, write it over the formulas of ``espresso_mpi.optim``, in a module beside ``layerwise``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ..default import default_session
from ..session import Session
from .arguments import optax_for
from .layerwise import scale_by_clan, scale_by_onebit_lamb
from .local_steps import diloco, sparseloco
from .optimizers import compressed_trace, scale_by_demo, scale_by_onebit_adam
from .trees import averaged_tree, one_chain
from .zero_one import zero_one_adam

__all__ = [
    "SynchronizeState",
    "compressed_trace",
    "diloco",
    "scale_by_clan",
    "scale_by_demo",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "sparseloco",
    "sync",
    "synchronize",
    "zero_one_adam",
]


def sync(grads: Any, session: Session | None = None, *, ordered: bool = True, after: Any = None) -> Any:
    """The mean of gradients over the ranks, inside ``jit`` and outside.

    Every rank must run the same program: the calls are made in program order, and a rank that makes another number of
    them, or with other arrays, is an error as for ``Session.sync``. Compiled programs hold on to the session.

    Args:
        grads: arrays in any tree of JAX; float32, float16, bfloat16 or float64. None stands for no array.
        session: default: ``espresso_mpi.default_session()``.
        ordered: JAX keeps the calls of a thread in program order, in a program and between programs, which takes its
            slower way of starting a program. False leaves the order to the data: each call must need the result of the
            one before it, as in a training step that is called with the weights of the step before.
        after: orders the calls by data, and needs no ordered effects: 0 for the first call of a program, and for every
            other one the token that the call before it returned, also in another program. Calls that share a session
            must follow each other in one chain: two that do not can change places on one rank.

    Returns:
        the same tree with new arrays; with ``after``, a pair of this tree and the next token, an int32.

    Calls of several threads need a session each: two calls of one session at the same time are an error.

    An error of ``Session.sync`` in a program comes as ``jax.errors.JaxRuntimeError``, with its name and text.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import espresso_mpi.jax
        >>> step = jax.jit(lambda x: espresso_mpi.jax.sync({"w": x * 2}))
        >>> float(step(jnp.ones(3))["w"][0])
        2.0
        >>> def two(x, token):
        ...     first, token = espresso_mpi.jax.sync({"w": x}, after=token)
        ...     return espresso_mpi.jax.sync({"v": x + 1}, after=token)
        >>> _, token = jax.jit(two)(jnp.ones(3), 0)
        >>> int(token)
        2
    """
    chosen = session if session is not None else default_session()
    return averaged_tree(grads, chosen, ordered, after)


class SynchronizeState(NamedTuple):
    """The state of ``synchronize``.

    Attributes:
        token: the number of updates so far, an int32; see ``after`` of ``sync``.

    Example:
        >>> import espresso_mpi.jax
        >>> int(espresso_mpi.jax.SynchronizeState(0).token)
        0
    """

    token: Any


def synchronize(session: Session | None = None, *, ordered: bool = False) -> Any:
    """A gradient transformation of optax that averages over the ranks: put it first in ``optax.chain``.

    Its updates are ordered by its state: each needs the token that the one before it returned.

    Args:
        session: as for ``sync``.
        ordered: order the calls by JAX's ordered effects instead. Two optimizers that share a session need it, unless
            each of their updates depends on the one before.

    Example:
        >>> import jax.numpy as jnp, optax  # doctest: +SKIP
        >>> optimizer = optax.chain(espresso_mpi.jax.synchronize(session), optax.adamw(1e-3))  # doctest: +SKIP
    """
    optax = optax_for("synchronize", "call espresso_mpi.jax.sync")

    def start(params: Any) -> SynchronizeState:
        return SynchronizeState(jax.numpy.zeros((), jax.numpy.int32))

    def update(updates: Any, state: SynchronizeState, params: Any = None) -> tuple[Any, SynchronizeState]:
        if ordered:
            return sync(updates, session), SynchronizeState(state.token + 1)
        one_chain(update, session if session is not None else default_session())
        means, token = sync(updates, session, after=state.token)
        return means, SynchronizeState(token)

    return optax.GradientTransformation(start, update)
