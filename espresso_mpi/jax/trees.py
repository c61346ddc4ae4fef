"""Trees of arrays: averaged in a program, and computed with, by ``sync`` and the optimizers. May import: JAX."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ..errors import ConfigError
from ..optim.rules import GradientMeans
from ..optim.zero_variance import LARGEST
from ..session import Session
from .primitive import Site, averaged

_LOG = logging.getLogger("espresso_mpi")

_ROW = 1 << 20
"""Exponents whose sum is an int32."""


def averaged_tree(grads: Any, session: Session, ordered: bool, after: Any, dense: GradientMeans | None = None) -> Any:
    """The means of arrays in any tree, as of ``sync``; with ``after``, and the next token.

    Args:
        dense: makes the means in the place of ``Session.sync``, with names and a compressor of its own.
    """
    arrays, tree = named(grads)
    names, leaves, shapes = tuple(arrays), list(arrays.values()), _shapes(arrays)
    if after is None:
        return jax.tree_util.tree_unflatten(tree, averaged(Site(session, names, shapes, ordered, dense=dense), leaves))
    given = jnp.asarray(after)
    if given.shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ConfigError(f"after: got {given.dtype}{given.shape}; expected 0, or the token of the call before")
    token = given.astype(jnp.int32)
    *means, token = averaged(Site(session, names, shapes, False, counted=True, dense=dense), [*leaves, token])
    return jax.tree_util.tree_unflatten(tree, means), token


def called(
    act: Callable[[dict[str, np.ndarray]], None], arrays: dict[str, Any], session: Session, after: Any
) -> tuple[dict[str, Any], Any]:
    """The arrays as a function changes them when the program runs, and the next token.

    Args:
        act: as of ``Site``. It may call the session, as often as on all other ranks.
        arrays: by name.
        after: the token of the call before.
    """
    site = Site(session, tuple(arrays), _shapes(arrays), False, counted=True, act=act)
    *found, token = averaged(site, [*arrays.values(), after])
    return dict(zip(arrays, found)), token


def named(tree: Any) -> tuple[dict[str, Any], Any]:
    """The arrays of a tree by the names that they have in the session, and the structure of the tree."""
    paths, shape = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path) or "grads": jnp.asarray(leaf) for path, leaf in paths}, shape


def _shapes(arrays: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays.values())


_chains: weakref.WeakKeyDictionary[Session, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The transformation that orders the calls of a session by its state."""


def one_chain(transformation: Any, session: Session) -> None:
    """Warn, when a program is traced, of a second transformation that orders the calls of a session by itself.

    Args:
        transformation: one object for all its updates.
    """
    known = _chains.setdefault(session, weakref.ref(transformation))
    if known() is not transformation:
        if known() is not None and session.topology.size > 1:
            _LOG.warning(
                "espresso_mpi.jax: a second optimizer synchronises by this session; unless their updates depend on "
                "each other, their calls can change places on a rank: use synchronize(ordered=True) in both, or a "
                "session for each"
            )
        _chains[session] = weakref.ref(transformation)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def counter() -> Any:
    """A number of steps, at first."""
    return jnp.zeros((), jnp.int32)


def zeros(params: Any) -> Any:
    """Float32 zeros in the shapes of the parameters."""
    return jax.tree_util.tree_map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)


def numbers(params: Any, value: float) -> Any:
    """A float32 for each parameter."""
    return jax.tree_util.tree_map(lambda _: jnp.float32(value), params)


def single(tree: Any) -> Any:
    """The tree in float32."""
    return jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float32), tree)


def precise(tree: Any) -> Any:
    """The tree in float32, and in float64 what has it."""
    return jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.asarray(x).dtype, jnp.float32)), tree)


def copied(tree: Any) -> Any:
    """The tree in memory of its own: a program to which two arrays are donated cannot be given the same one twice."""
    return jax.tree_util.tree_map(jnp.copy, tree)


def like(tree: Any, other: Any) -> Any:
    """The tree with the element types of another one."""
    return jax.tree_util.tree_map(lambda x, y: x.astype(jnp.asarray(y).dtype), tree, other)


def difference(tree: Any, other: Any) -> Any:
    """A tree minus another one."""
    return jax.tree_util.tree_map(lambda x, y: x - y, tree, other)


def typical_variances(variances: Any) -> Any:
    """What counts as v where v is zero, a float32 for each parameter: as of ``espresso_mpi.optim.zero_variance``."""
    leaves, tree = jax.tree_util.tree_flatten(variances)
    exponents = [_total(jnp.where(v > 0, jnp.frexp(v)[1], 0)) for v in leaves]
    counts = [_total(v > 0) for v in leaves]
    count, total = (sum(numbers, jnp.float32(0)) for numbers in (counts, exponents))
    among_all = jnp.where(count > 0, _typical(count, total), 2.0**LARGEST)
    found = [jnp.where(n > 0, _typical(n, total), among_all) for n, total in zip(counts, exponents)]
    return jax.tree_util.tree_unflatten(tree, found)


def _total(values: Any) -> Any:
    """The sum of small integers, a float32: exact sums of rows, because one of all could exceed an int32."""
    flat = values.astype(jnp.int32).ravel()
    row = max(1, min(_ROW, flat.size))
    return jnp.pad(flat, (0, -flat.size % row)).reshape(-1, row).sum(axis=1).astype(jnp.float32).sum()


def _typical(count: Any, total: Any) -> Any:
    exponent = jnp.minimum(jnp.floor(total / jnp.maximum(count, 1)), LARGEST)
    return jnp.where(count > 0, jnp.ldexp(jnp.float32(1), exponent.astype(jnp.int32)), 0)


def mapped(results: int, formula: Callable[..., Any], trees: tuple[Any, ...], last: Any) -> list[Any]:
    """So many trees: what a formula makes of the leaves of several trees of one structure.

    Raises:
        ValueError: JAX's, if the structures differ.
    """
    leaves, shape = jax.tree_util.tree_flatten(last)
    others = [shape.flatten_up_to(tree) for tree in trees]
    found = [formula(*arrays) for arrays in zip(*others, leaves)]
    return [jax.tree_util.tree_unflatten(shape, [result[index] for result in found]) for index in range(results)]
