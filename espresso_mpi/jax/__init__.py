"""JAX programs: gradients that are averaged inside ``jit``, and as a transformation of optax.

What lives here: the adapter for JAX, which is imported here only. May import: the public names of ``espresso_mpi``,
JAX, and optax where it is asked for.
"""

from __future__ import annotations

from typing import Any

import jax

from ..default import default_session
from ..errors import ConfigError
from ..session import Session
from .primitive import Site, averaged

__all__ = ["sync", "synchronize"]


def sync(grads: Any, session: Session | None = None, *, ordered: bool = True) -> Any:
    """The mean of gradients over the ranks, inside ``jit`` and outside.

    Every rank must run the same program: the calls are made in program order, and a rank that makes another number of
    them, or with other arrays, is an error as for ``Session.sync``. Compiled programs hold on to the session.

    Args:
        grads: arrays in any tree of JAX; float32, float16, bfloat16 or float64. None stands for no array.
        session: default: ``espresso_mpi.default_session()``.
        ordered: JAX keeps the calls in program order, in a program and between programs, which takes its slower way of
            starting a program. False leaves the order to the data: each call must need the result of the one before
            it, as in a training step that is called with the weights of the step before.

    Returns:
        the same tree with new arrays.

    An error of ``Session.sync`` in a program comes as ``jax.errors.JaxRuntimeError``, with its name and text.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import espresso_mpi.jax
        >>> step = jax.jit(lambda x: espresso_mpi.jax.sync({"w": x * 2}))
        >>> float(step(jnp.ones(3))["w"][0])
        2.0
    """
    chosen = session if session is not None else default_session()
    paths, tree = jax.tree_util.tree_flatten_with_path(grads)
    names = [jax.tree_util.keystr(path) or "grads" for path, _ in paths]

    leaves = [jax.numpy.asarray(leaf) for _, leaf in paths]
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return jax.tree_util.tree_unflatten(tree, averaged(Site(chosen, tuple(names), shapes, ordered), leaves))


def synchronize(session: Session | None = None, *, ordered: bool = True) -> Any:
    """A gradient transformation of optax that averages over the ranks: put it first in ``optax.chain``.

    Args:
        session, ordered: as for ``sync``.

    Example:
        >>> import jax.numpy as jnp, optax  # doctest: +SKIP
        >>> optimizer = optax.chain(espresso_mpi.jax.synchronize(session), optax.adamw(1e-3))  # doctest: +SKIP
    """
    try:
        import optax
    except ImportError as error:
        raise ConfigError("synchronize: optax is missing; pip install optax, or call espresso_mpi.jax.sync") from error

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return sync(updates, session, ordered=ordered), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
