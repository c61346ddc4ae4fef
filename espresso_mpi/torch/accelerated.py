"""Hugging Face accelerate: the hook of DDP on the models that an ``Accelerator`` prepares."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..session import Session
from .ddp import ddp_hook
from .loss_scale import follow_scaler


def hook_accelerator(accelerator: Any, session: Session) -> None:
    """Compress the gradients of all models that an ``accelerate.Accelerator`` wraps in DDP from now on.

    Also for ``transformers.Trainer``: pass ``trainer.accelerator`` before ``train()``.

    Args:
        accelerator: made under ``mpirun``, after ``torch.distributed.init_process_group("espresso")``; on CPUs with
            ``Accelerator(cpu=True)``.
        session: over all ranks; with ``mixed_precision="fp16"`` of ``nonfinite="skip_all"``.

    Raises:
        ConfigError: the accelerator has another number of processes than the session has ranks, or a scaler that does
            not go with the session.

    Example:
        >>> accelerator = Accelerator(cpu=True)  # doctest: +SKIP
        >>> espresso_mpi.torch.hook_accelerator(accelerator, session)  # doctest: +SKIP
        >>> model, optimizer = accelerator.prepare(model, optimizer)  # doctest: +SKIP
    """
    if accelerator.num_processes != session.topology.size:
        raise ConfigError(
            f"hook_accelerator: the Accelerator has {accelerator.num_processes} process(es), the session "
            f"{session.topology.size} rank(s); start the program by mpirun, call init_process_group('espresso') before "
            f"the Accelerator is made, and on CPUs make it by Accelerator(cpu=True)"
        )
    if accelerator.scaler is not None:
        follow_scaler(session, accelerator.scaler)
    prepare = accelerator.prepare_model

    def prepared(model: Any, *arguments: Any, **more: Any) -> Any:
        wrapped = prepare(model, *arguments, **more)
        if isinstance(wrapped, DistributedDataParallel) and wrapped is not model:
            wrapped.register_comm_hook(session, ddp_hook)
        return wrapped

    accelerator.prepare_model = prepared
