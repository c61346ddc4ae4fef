"""The workload of a step in which tensors travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espresso_mpi.errors import PlanError
from espresso_mpi.types import buffer_name

from .workload import Workload, WorkloadTensor


def fused(workload: Workload, groups: Sequence[Sequence[str]]) -> Workload:
    """The workload with the tensors of every group as one buffer, which is ready when its last tensor is.

    Raises:
        PlanError: a name that the workload does not have; different element types in a group.
    """
    known = {tensor.name: tensor for tensor in workload.tensors}
    missing = [name for group in groups for name in group if name not in known]
    if missing:
        raise PlanError(f"groups name {', '.join(map(repr, missing[:3]))}, which the workload does not have")
    grouped = {name for group in groups for name in group}
    buffers = [_buffer([known[name] for name in group]) for group in groups]
    buffers += [tensor for tensor in workload.tensors if tensor.name not in grouped]
    return replace(workload, tensors=tuple(sorted(buffers, key=lambda tensor: tensor.ready)))


def _buffer(members: Sequence[WorkloadTensor]) -> WorkloadTensor:
    kinds = {tensor.dtype for tensor in members}
    if len(kinds) > 1:
        raise PlanError(f"group of {members[0].name!r}: element types {', '.join(sorted(kinds))}; they must be equal")
    if len(members) == 1:
        return members[0]
    return WorkloadTensor.joined(buffer_name([tensor.name for tensor in members]), members)
