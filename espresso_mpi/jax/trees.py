"""Trees of arrays that are averaged in a program: what ``sync`` and the optimizers share. May import: JAX, optax."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import jax

from ..errors import ConfigError
from ..session import Session
from .primitive import Site, averaged

_LOG = logging.getLogger("espresso_mpi")


def averaged_tree(grads: Any, session: Session, ordered: bool, after: Any, dense: str = "") -> Any:
    """The means of arrays in any tree, as of ``sync``; with ``after``, and the next token.

    Args:
        dense: not compressed, whatever the session does; the calls of tensors begin with this name.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(grads)
    names = tuple(jax.tree_util.keystr(path) or "grads" for path, _ in paths)
    leaves = [jax.numpy.asarray(leaf) for _, leaf in paths]
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    if after is None:
        return jax.tree_util.tree_unflatten(tree, averaged(Site(session, names, shapes, ordered, dense=dense), leaves))
    given = jax.numpy.asarray(after)
    if given.shape or not jax.numpy.issubdtype(given.dtype, jax.numpy.integer):
        raise ConfigError(f"after: got {given.dtype}{given.shape}; expected 0, or the token of the call before")
    token = given.astype(jax.numpy.int32)
    *means, token = averaged(Site(session, names, shapes, False, counted=True, dense=dense), [*leaves, token])
    return jax.tree_util.tree_unflatten(tree, means), token


def optax_for(owner: str, instead: str) -> Any:
    """The module optax.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optax
    except ImportError as error:
        raise ConfigError(f"{owner}: optax is missing; pip install optax, or {instead}") from error
    return optax


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
