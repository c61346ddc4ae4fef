"""The part of a session that saves and loads checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..state import folder, loading, rescaling, snapshots
from .base import SessionBase


class Checkpoints(SessionBase):
    """States of a session; see docs/state.md."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, with which training continues exactly: counters, seed, residuals; as copies.

        The values are JSON values, except for the float32 numpy arrays under ``arrays``: residuals and compressors' own
        arrays, by ``tensor|elements|encode point|region|what``.

        Raises:
            ConfigError: tensors are still under way, or steps are recorded.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     mean = session.sync({"w": np.ones(10_000, np.float32)})
            ...     session.state_dict()["step"]
            1
        """
        self._refuse_while_recording("state_dict")
        self._held.release()
        if self._engine.busy:
            raise ConfigError("state_dict: tensors are still under way; call wait_all() before it")
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        sync_state, options = self._engine.sync_state, replace(self._options, seed=self._engine.seed)
        return snapshots.snapshot(self._transport, options, self._step, sync_state)

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load the result of ``state_dict()`` of a job with the same compressors and feedback. Collective.

        On the same ranks, nodes and routes, every rank loads its own state, and training continues exactly. On others,
        the state is resharded: the mean residual is conserved. Together, the ranks must pass the states of all former
        ranks, each once.

        Args:
            states: one state, or a list of any number of states.

        Raises:
            StateError: on every rank: a state is of another version, does not fit, is damaged or is missing.
                ConfigError: on every rank: tensors are still under way, or steps are recorded.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     state = session.state_dict()
            ...     session.load_state_dict(state)
        """
        self._go_on(lambda: loading.load(self._transport, self._options, states), "load_state_dict")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the states of all ranks into a folder, one file a rank. Collective.

        Raises:
            StateError: on every rank: a file cannot be written, or ranks are at different steps. ConfigError: on every
                rank: steps are recorded.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     mean = session.sync({"w": np.ones(10_000, np.float32)})
            ...     session.save("saved")
        """
        self._refuse_while_recording("save")
        self._together("save", lambda: folder.save(self._transport, self._snapshot(), path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """As ``load_state_dict``, from a folder that ``save`` wrote. Collective.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.save("loaded")
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.load("loaded")
        """
        self._go_on(lambda: folder.load_files(self._transport, self._options, path), "load")

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor, because a loss scaler has changed the unit of gradients. Collective.

        Args:
            factor: the new loss scale divided by the old, the same on every rank. With 1, it returns at once.

        Raises:
            ConfigError: on every rank: the factor is not a positive number in the range of float32, the ranks have
                different factors, or tensors are still under way.
            StateError: on every rank: a user's compressor does not declare its own arrays.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     mean = session.sync({"w": np.ones(10_000, np.float32)})
            ...     session.rescale(0.5)  # the loss scale was halved
        """
        if rescaling.is_one(factor):
            return
        engine, options = self._engine, self._options
        act = partial(rescaling.rescale, self._transport, options, given=factor)
        self._between_steps("rescale", lambda: act(store=engine.sync_state.store))

    def _loaded(self, read: Callable[[], loading.Loaded]) -> loading.Loaded:
        """What ``read`` returns. Collective, while no tensor is under way."""
        return read()

    def _go_on(self, read: Callable[[], loading.Loaded], name: str) -> None:
        def load() -> None:
            loaded = self._loaded(read)
            self._step = loaded.step
            self._engine.load(loaded.sync_state, loaded.seed)
            self._recorder.rewind()

        self._refuse_while_recording(name)
        self._between_steps(name, load)
