"""A strategy for Lightning: DDP by the process group ``"espresso"``, with compressed gradients.

Import this module by itself: it needs the package ``lightning``, which ``espresso_mpi.torch`` does not.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed

from ..errors import ConfigError, EspressoError
from ..session import Session
from .ddp import ddp_hook
from .groups import group_session
from .loss_scale import follow_scaler
from .process_group import ProcessGroup

_LOG = logging.getLogger("espresso_mpi")


class EspressoStrategy(DDPStrategy):
    """DDP whose gradients are averaged by a session. Start the program by ``mpirun``, or by ``espresso-mpi run``.

    The residuals are saved beside each checkpoint, in the folder ``<checkpoint>.residuals``, and loaded with it when
    training goes on.

    Args:
        compressor: of the session.
        session: over all ranks; default: a new one, opened when training begins. It stays open, so that residuals
            are kept from one ``fit`` to the next.
        options: further options of the new session, as for ``espresso_mpi.Session``; ``nonfinite`` is by default
            ``"skip_all"`` with ``precision="16-mixed"``, whose scaler the residuals follow.
        process_group_backend: for everything but gradients.
        more: as for ``DDPStrategy``, such as ``find_unused_parameters``.

    Raises:
        ConfigError: ``session`` and ``options`` are given; later: the trainer has another number of devices or nodes
            than MPI has started.

    Example:
        >>> from espresso_mpi.torch.lightning import EspressoStrategy  # doctest: +SKIP
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=EspressoStrategy("int8"))  # doctest: +SKIP
    """

    strategy_name = "espresso"

    def __init__(
        self,
        compressor: str = "none",
        *,
        session: Session | None = None,
        options: Mapping[str, Any] | None = None,
        process_group_backend: str = "espresso",
        **more: Any,
    ) -> None:
        if session is not None and (options or compressor != "none"):
            raise ConfigError("EspressoStrategy: got a session and also options of one; pass these to Session")
        more.setdefault("cluster_environment", MPIEnvironment())
        super().__init__(process_group_backend=process_group_backend, **more)
        self._session, self._options = session, {"compressor": compressor, **(options or {})}

    @property
    def session(self) -> Session:
        """What averages the gradients. The first use opens it, on all ranks."""
        if self._session is None or not self._session.usable:
            scaled = {} if self._scaler is None else {"nonfinite": "skip_all"}
            self._session = group_session(**{**scaled, **self._options})
        return self._session

    @property
    def _scaler(self) -> Any:
        """The scaler of the precision, or None."""
        return getattr(self.precision_plugin, "scaler", None)

    def setup_environment(self) -> None:
        """Refuse a trainer for other ranks than those of MPI, and open the process group and the session."""
        ranks = self.cluster_environment.world_size()
        if self.num_nodes * self.num_processes != ranks:
            here = self.cluster_environment.local_rank()
            raise ConfigError(
                f"EspressoStrategy: Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}), but MPI started "
                f"{ranks} rank(s), of which this one is number {here} on its node; pass devices=<ranks on a node> and "
                f"num_nodes=<nodes>, or start as many by mpirun"
            )
        super().setup_environment()
        _LOG.info("gradients are averaged by %r", self.session)

    def _register_ddp_hooks(self) -> None:
        """Lightning itself registers hooks on GPUs only."""
        self.model.register_comm_hook(self.session, ddp_hook)
        if self._scaler is not None:
            follow_scaler(self.session, self._scaler)

    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks know of it: they may wait for this one. Of the library's own errors they know."""
        super().on_exception(exception)
        if isinstance(exception, EspressoError):
            return
        group = distributed.group.WORLD
        for session in (self._session, group._opened if isinstance(group, ProcessGroup) else None):
            if session is not None:
                session.__exit__(type(exception), exception, exception.__traceback__)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As ``DDPStrategy``; the mean of integers is rounded towards zero, as Lightning has it with gloo."""
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            total = super().reduce(tensor, group, "sum")
            return total.copy_(total / distributed.get_world_size(group))
        return super().reduce(tensor, group, reduce_op)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, and the residuals beside it. Collective."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.session.save(_beside(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; to go on with training also the residuals, if they were saved. Collective."""
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        places = _beside(checkpoint_path), _beside(os.path.realpath(checkpoint_path))  # last.ckpt can be a link
        residuals = next(filter(os.path.isdir, places), places[0])
        there = np.array([fits and os.path.isdir(residuals)])
        if self.session.allreduce(there, op="max", name="residuals are there")[0]:
            self.session.load(residuals)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and its residuals."""
        super().remove_checkpoint(filepath)
        shutil.rmtree(_beside(filepath), ignore_errors=True)


def _beside(checkpoint: Any) -> str:
    return f"{os.fspath(checkpoint)}.residuals"


StrategyRegistry.register("espresso", EspressoStrategy, description=EspressoStrategy.__doc__, override=True)
