"""Messages that a program pushes in one step and waits for in a later one, with other steps in between.

A program cannot hold what is under way. Therefore the arrays of a message and its handle stay here, and the program
gets a number for them, which it keeps in its state. May import: JAX and the package.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from ..errors import EspressoError, StateError
from ..session import Session
from .trees import called, named

if TYPE_CHECKING:
    from ..sessions.handles import Handle

_LOG = logging.getLogger("espresso_mpi")

_NUMBER = "number of the message"
"""The name of the number beside the arrays of a message."""


_Key = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the arrays of a message."""


@dataclass
class _Message:
    """Arrays that were pushed together.

    Attributes:
        number: of the message.
        arrays: by name; they become the means.
        handle: None once it was waited for.
        error: how the push ended, if it failed.
    """

    number: int
    arrays: dict[str, np.ndarray]
    handle: Handle | None
    error: EspressoError | None = None

    def end(self) -> None:
        """Wait for the push."""
        if self.handle is not None:
            try:
                self.handle.wait()
            except EspressoError as error:
                self.error = error
            self.handle = None


@dataclass(frozen=True, eq=False)
class UnderWay:
    """The messages of one transformation: of each tuple of names and shapes, the latest.

    The result of a message stays until the next one of the same arrays, so that a program that is run again from the
    state of before finds it again.

    Attributes:
        owner: the transformation, in errors.
    """

    owner: str
    session: Session
    _latest: dict[_Key, _Message] = field(default_factory=dict)

    def push(self, tree: Any, after: Any) -> tuple[Any, Any]:
        """In a program: start to average float32 arrays over the ranks.

        Returns:
            The number of the message, a positive int32, and the next token. The ranks have different numbers.
        """
        found, token = called(self._push, {**named(tree)[0], _NUMBER: jnp.zeros((), jnp.int32)}, self.session, after)
        return found[_NUMBER], token

    def wait(self, tree: Any, number: Any, after: Any) -> tuple[Any, Any]:
        """In a program: the means of a message, and the next token. Collective.

        Args:
            tree: arrays like those that were pushed, of any values.
            number: what ``push`` returned.

        An error of the push is raised here, in every call with its number; a StateError if a rank does not have the
        message. Both on every rank.
        """
        arrays, shape = named(tree)
        found, token = called(self._wait, {**arrays, _NUMBER: number}, self.session, after)
        return jax.tree_util.tree_unflatten(shape, [found[name] for name in arrays]), token

    def _push(self, arrays: dict[str, np.ndarray]) -> None:
        given, key = _without_number(arrays)
        before = self._latest.pop(key, None)
        if before is not None and before.handle is not None:  # its state was dropped
            _LOG.warning("%s: a message under way is dropped: the state that waited for it was not used", self.owner)
            before.end()
        own = {name: np.empty_like(array) for name, array in given.items()} if before is None else before.arrays
        for name, array in given.items():
            np.copyto(own[name], array)
        number = 1 + secrets.randbelow(2**31 - 1)  # that of another process, in a saved state, is hardly the same
        self._latest[key] = _Message(number, own, self.session.push_together(own))
        arrays[_NUMBER][...] = number

    def _wait(self, arrays: dict[str, np.ndarray]) -> None:
        targets, key = _without_number(arrays)
        message = self._latest.get(key)
        known = message is not None and message.number == int(arrays[_NUMBER])
        on_all = self.session.allreduce(np.array([known], np.uint8), op="min", name=f"{self.owner} under way")
        if message is None or not on_all[0]:
            where = "another rank" if known else "this rank"
            raise StateError(
                f"{self.owner}: the state waits for a message with {key[0][0]!r}, which {where} does not have; "
                "expected the latest message that this transformation has sent in this process. A state that was saved "
                "while a message was under way, or that is older than the latest message, cannot be continued as it "
                "is: save what update(…, average=True) returns, or go on without the message, by "
                "optax.tree_utils.tree_set(state, under=jax.numpy.zeros_like(state.under)) on all ranks"
            )
        message.end()
        if message.error is not None:
            raise message.error
        for name, target in targets.items():
            np.copyto(target, message.arrays[name])


def _without_number(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], _Key]:
    """The arrays of a message, and what it is found by."""
    given = {name: array for name, array in arrays.items() if name != _NUMBER}
    return given, tuple((name, array.shape) for name, array in given.items())
