"""What all ranks must have in common besides gradients: equal parameters and buffers."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator

import numpy as np
import torch

from ..errors import MismatchError
from ..session import Session

_LOG = logging.getLogger("espresso_mpi")


def broadcast_module(module: torch.nn.Module, session: Session, root: int = 0) -> None:
    """Copy the parameters and buffers of one rank to all ranks. Collective.

    Args:
        module: a module with the same names, shapes and types on every rank.
        session: the session over the ranks.
        root: the rank whose values are copied.

    Raises:
        MismatchError: the modules differ in names, shapes or types. Every rank raises it.

    Example:
        >>> import torch
        >>> with espresso_mpi.Session() as session:
        ...     espresso_mpi.torch.broadcast_module(torch.nn.Linear(3, 2), session)
    """
    tensors = dict(_tensors(module))
    with torch.no_grad():
        for name, tensor in tensors.items():
            session.broadcast(tensor.detach(), root=root, name=name)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _LOG.info("parameters and buffers of rank %d were copied to all: %d tensors, %d bytes", root, len(tensors), size)


def check_replicas(module: torch.nn.Module, session: Session) -> None:
    """Check that all ranks have the same parameters and buffers, bit for bit. Collective. It reads all of them.

    Raises:
        MismatchError: they differ. The error names the first tensor that differs. Every rank raises it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session() as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     espresso_mpi.torch.check_replicas(model, session)
    """
    names = [name for name, _ in _tensors(module)]
    sums = np.array([_checksum(tensor) for _, tensor in _tensors(module)], np.int64)
    least, most = sums.copy(), sums.copy()
    session.allreduce(least, op="min", name="check_replicas.least")
    session.allreduce(most, op="max", name="check_replicas.most")
    differ = np.flatnonzero(least != most)
    if differ.size:
        first = names[differ[0]]
        raise MismatchError(
            f"check_replicas: ranks have other values of {differ.size} of {len(names)} parameters and buffers, the "
            f"first is {first!r}; call broadcast_module after the model is made, seed the ranks alike, or update "
            f"parameters by the same gradients on every rank"
        )


def average_buffers(module: torch.nn.Module, session: Session) -> None:
    """Average the buffers of a module over the ranks, such as the running statistics of batch norms. Collective.

    Integer buffers such as ``num_batches_tracked`` become their maximum over the ranks. Bool buffers become True if
    they are True on any rank.

    Example:
        >>> import torch
        >>> norm = torch.nn.BatchNorm1d(3)
        >>> with espresso_mpi.Session() as session:
        ...     espresso_mpi.torch.average_buffers(norm, session)
        >>> norm.running_var
        tensor([1., 1., 1.])
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            session.allreduce(
                buffer, op="mean" if buffer.is_floating_point() else "max", name=f"average_buffers.{name}"
            )


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
