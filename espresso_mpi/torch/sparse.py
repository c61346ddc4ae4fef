"""Sums of sparse tensors, as embeddings with ``sparse=True`` have them for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..errors import ConfigError
from ..session import Session
from .work import HandleWork


def allreduce_sparse(session: Session, tensors: Sequence[torch.Tensor], op: str) -> HandleWork:
    """Sum sparse tensors over the ranks, in place: every rank gets the elements of all.

    The elements of all ranks are gathered, since each rank has others; ranks first tell how many they have, which the
    call waits for.

    Args:
        tensors: in the format COO, of the same shape and element type on every rank, each with its own elements; op:
            ``"sum"`` or ``"mean"``.

    Raises:
        ConfigError: another operator, or dense tensors among them; others as ``Session.allgather``.
    """
    if op not in ("sum", "mean"):
        raise ConfigError(f"all_reduce: op={op!r} of sparse tensors; expected sum or mean; make them dense before it")
    if not all(x.is_sparse for x in tensors):
        raise ConfigError("all_reduce: dense and sparse tensors in one call; reduce them by calls of their own")
    own = [x.detach().coalesce() for x in tensors]
    mine = torch.tensor([x._nnz() for x in own], dtype=torch.int64, device="cpu")
    counts = session.allgather(mine).view(-1, len(own))
    handles, after = [], []
    for number, x in enumerate(own):
        held = counts[:, number].tolist()
        indices, values = (_padded(part, max(1, *held)) for part in (x.indices().t(), x.values()))
        every = [part.new_empty(len(held) * part.numel()) for part in (indices, values)]
        for part, whole in zip((indices, values), every):
            handles.append(session.allgather(part.view(-1), out=whole, blocking=False))
        shaped = [whole.view(len(held), *part.shape) for part, whole in zip((indices, values), every)]
        after.append(partial(_summed, tensors[number], shaped, held, len(held) if op == "mean" else 1))
    return HandleWork(handles, list(tensors), after)


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    """All ranks give equally many rows."""
    padded = part.new_zeros(rows, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def _summed(target: torch.Tensor, parts: Sequence[torch.Tensor], held: list[int], divisor: int) -> None:
    indices, values = parts
    where = torch.cat([rows[:n] for rows, n in zip(indices, held)]).t()
    what = torch.cat([rows[:n] for rows, n in zip(values, held)])
    total = torch.sparse_coo_tensor(where, what / divisor if divisor > 1 else what, target.shape).coalesce()
    with torch.no_grad():  # a detached sparse tensor would have indices and values of its own
        target.copy_(total)
