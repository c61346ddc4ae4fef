"""Finds out from the environment alone whether the launcher has started several ranks.

A process whose launcher and MPI library do not belong together initialises MPI as a world of its own. Nothing fails
then: every process trains alone. What the launcher has put into the environment tells that case from a run on one rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SWITCH = "ESPRESSO_ALLOW_SINGLE"
"""The variable that is set to 1 if a world of one rank is intended, whatever the launcher says."""

_MPIRUN = "espresso-mpi run -n {ranks} -- python -m mpi4py train.py"


@dataclass(frozen=True)
class Claim:
    """The statement of a launcher that this process is one of several ranks.

    Attributes:
        variable, value: the environment variable that says so.
        launcher: the launcher that sets it.
        ranks: number of ranks (a lower limit if only the rank is known).
        rank: rank of this process; 0 if it is not known.
        cure: how to start the job.
    """

    variable: str
    value: str
    launcher: str
    ranks: int
    rank: int
    cure: str

    def problem(self) -> str:
        """The error text if MPI has a single rank, with the remedy."""
        return f"{self.difference()}; {self.remedy()}"

    def difference(self) -> str:
        """The contradiction between launcher and MPI."""
        return (
            f"{self.variable}={self.value} ({self.launcher}) says that this process is one of {self.ranks} ranks, but "
            f"MPI sees a world of 1 rank: MPI does not know the others, and each process would train alone"
        )

    def remedy(self) -> str:
        """How to start the job, and what to do if one rank is intended."""
        return f"{self.cure}; if a single rank is intended, set {SWITCH}=1"


@dataclass(frozen=True)
class _Source:
    """The variables of one launcher: the number of processes, and the rank of this one."""

    launcher: str
    size: str
    rank: str
    cure: str


_OTHER_MPI = (
    "start the job by the mpirun of the MPI library that mpi4py uses (espresso-mpi doctor names both), for example "
    + _MPIRUN
)
_SLURM = (
    "start the job by srun --mpi=pmix (srun --mpi=list shows what your Slurm has), or by mpirun inside the allocation, "
    "for example " + _MPIRUN
)

_MPI = (
    _Source("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", _OTHER_MPI),
    _Source("an mpirun or srun that speaks PMI", "PMI_SIZE", "PMI_RANK", _OTHER_MPI + ", or by srun --mpi=pmix"),
    _Source("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", _OTHER_MPI),
    _Source("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", _OTHER_MPI),
)
"""Launchers of MPI jobs. If one says 1, the variables of a resource manager around it do not count."""

_MANAGERS = (
    _Source("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _SLURM),
    _Source("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "start the job by flux run -o pmi=pmix, or by mpirun"),
)
"""Resource managers that start the processes themselves. Both variables must be there: the first alone may describe the
allocation in which a single process runs."""

_TORCH = _Source(
    "torchrun or a launcher like it",
    "WORLD_SIZE",
    "RANK",
    "start the job by mpirun in its place, for example " + _MPIRUN + " (on Kubernetes by the MPI operator's MPIJob)",
)


def claim(variables: Mapping[str, str] = os.environ) -> Claim | None:
    """The statement of a launcher that this process is one of several ranks; None if there is none.

    Not counted, because a single process may run with them: ``SLURM_NTASKS`` of an allocation or a batch script (the
    script is one process until ``srun`` starts more), and ``JOB_COMPLETION_INDEX``, for the pods of an indexed
    Kubernetes job may be independent. ``WORLD_SIZE`` without ``RANK`` counts unless a launcher of MPI has started this
    process.
    """
    torch = _claimed(_TORCH, variables)
    if torch is not None and (_TORCH.rank in variables or not _started_by_mpi(variables)):
        return torch
    if any(_number(variables, source.size) == 1 for source in _MPI):
        return None
    for source in _MPI:
        found = _claimed(source, variables)
        if found is not None:
            return found
    for source in _MANAGERS:
        found = _claimed(source, variables) if source.rank in variables else None
        if found is not None:
            return found
    return _slurm_task(variables) or _numbered(variables)


def allowed(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has set that a world of one rank is intended."""
    return variables.get(SWITCH, "") == "1"


def _started_by_mpi(variables: Mapping[str, str]) -> bool:
    return any(_number(variables, source.size) is not None for source in _MPI)


def _claimed(source: _Source, variables: Mapping[str, str]) -> Claim | None:
    ranks = _number(variables, source.size)
    if ranks is None or ranks < 2:
        return None
    return _made(source, source.size, variables, ranks)


def _slurm_task(variables: Mapping[str, str]) -> Claim | None:
    """A task of a Slurm step of unknown size; a batch script counts as task 0 of the job, outside of any step."""
    rank, ranks = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_NTASKS")
    if rank is None or ranks is None or ranks < 2 or _number(variables, "SLURM_STEP_NUM_TASKS") is not None:
        return None
    if "SLURM_STEP_ID" not in variables and rank == 0:
        return None
    return _made(_Source("srun", "SLURM_NTASKS", "SLURM_PROCID", _SLURM), "SLURM_NTASKS", variables, ranks)


def _numbered(variables: Mapping[str, str]) -> Claim | None:
    """PMIx sets only the rank of a process, so all but the first know that there are several."""
    rank = _number(variables, "PMIX_RANK")
    if rank is None or rank < 1 or "PMIX_NAMESPACE" not in variables:
        return None
    source = _Source("a launcher that speaks PMIx", "PMIX_RANK", "PMIX_RANK", _OTHER_MPI)
    return _made(source, "PMIX_RANK", variables, rank + 1)


def _made(source: _Source, variable: str, variables: Mapping[str, str], ranks: int) -> Claim:
    rank = _number(variables, source.rank) or 0
    cure = source.cure.format(ranks=ranks)
    return Claim(variable, variables[variable], source.launcher, ranks, rank, cure)


def _number(variables: Mapping[str, str], name: str) -> int | None:
    try:
        return int(variables[name])
    except (KeyError, ValueError):
        return None
