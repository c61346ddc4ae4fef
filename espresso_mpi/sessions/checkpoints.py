"""The part of a session that saves and loads what training needs to go on."""

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
        """What training needs to go on exactly: step counters, seed, and what is kept on this rank, as copies.

        JSON values, and float32 numpy arrays under ``memory``: residuals and what methods keep of their own, by
        ``tensor|elements|encode point|region|what``.

        Raises:
            ConfigError: tensors are still under way, or steps are recorded.
        """
        self._refuse_while_recording("state_dict")
        self._held.release()
        if self._engine.busy:
            raise ConfigError("state_dict: tensors are still under way; call wait_all() before it")
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        keeping, options = self._engine.keeping, replace(self._options, seed=self._engine.seed)
        return snapshots.snapshot(self._transport, options, self._step, keeping)

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``state_dict()`` of a job with the same compressors and feedback. Collective.

        On the same ranks, nodes and routes, where every rank loads its own, training goes on exactly. On others the
        mean of what was owed is conserved: together the ranks must bring the states of all old ranks, each once.

        Args:
            states: one state or several, also none (an empty list).

        Raises:
            StateError: on every rank, if a state is of another version, does not fit or is damaged, or one is missing.
                ConfigError: on every rank: tensors are still under way, or steps are recorded.
        """
        self._go_on(lambda: loading.load(self._transport, self._options, states), "load_state_dict")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the states of all ranks into a folder, one file a rank. Collective.

        Raises:
            StateError: on every rank: a file cannot be written, or ranks are at different steps. ConfigError: on every
                rank: steps are recorded.
        """
        self._refuse_while_recording("save")
        self._together("save", lambda: folder.save(self._transport, self._snapshot(), path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a folder that ``save`` wrote, as ``load_state_dict``. Collective."""
        self._go_on(lambda: folder.load_files(self._transport, self._options, path), "load")

    def rescale(self, factor: float) -> None:
        """Multiply what is kept of gradients by a factor: their unit has changed, as by a loss scaler. Collective.

        Args:
            factor: the new loss scale divided by the old, the same on every rank; 1 does nothing and waits for nobody.

        Raises:
            ConfigError: on every rank: no number above 0 within the range of float32, ranks have different factors, or
                tensors are still under way.
                StateError: on every rank: a compressor of your own does not say what it keeps.
        """
        if rescaling.is_one(factor):
            return
        engine, options = self._engine, self._options
        act = partial(rescaling.rescale, self._transport, options, given=factor)
        self._between_steps("rescale", lambda: act(memory=engine.keeping.memory))

    def _go_on(self, read: Callable[[], loading.Loaded], name: str) -> None:
        def load() -> None:
            loaded = read()
            self._step = loaded.step
            self._engine.load(loaded.keeping, loaded.seed)
            self._recorder.rewind()

        self._refuse_while_recording(name)
        self._between_steps(name, load)
