"""Whether this MPI takes device pointers, found out by trying, where a crash does no harm: in a job of two processes.

An MPI that does not take them reads them as host addresses and crashes, or copies something else. What a library says
of itself does not settle it: Open MPI may be built with CUDA and have it switched off, or be built without and send by
a UCX that has it. So the probe starts ``mpirun -n 2`` on this node with the settings of this job and lets both
processes send each other GPU memory, in the way that ``transport`` does: non-blocking messages between two ranks, of
lengths on both sides of the limits at which MPI libraries change their protocol. Collectives of MPI are not tried, for
none is ever given GPU memory.

What a success does not show: that messages *between* nodes work. They go by another transport of the same library;
where that one cannot read GPU memory, the job ends in the first exchange, and ``ESPRESSO_CUDA_AWARE=0`` is the cure.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espresso_mpi.arrays import device
from espresso_mpi.cluster.launch import child_environment, find_mpirun
from espresso_mpi.errors import ConfigError

LIMIT_S = 60.0
"""Longest time of a probe. Two processes that load numba and start on a GPU need about ten seconds on a slow disk."""

PASSED = "espresso-mpi: device pointers work"
"""What a process of the probe prints if all of its messages arrived as they were sent."""

PROBLEM = "espresso-mpi: problem:"
"""What a process of the probe writes before its reason for failing."""

DEVICE = "ESPRESSO_PROBE_GPU"
"""Tells the processes of the probe which GPU to use."""

_GRACE_S = 10.0

_FOREIGN = (
    *("PMIX_", "PMI_", "PMI2_", "OMPI_", "PRTE_", "PRRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPISPAWN_"),
    *("MV2_COMM_WORLD_", "PALS_", "PALSD_", "ALPS_APP_", "SLURM_", "SLURMD_", "PBS_", "LSB_", "FLUX_", "COBALT_"),
)
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")
_OF_THE_JOB = (
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_cpu_type"),
    *("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
)


@dataclass(frozen=True)
class ProbeResult:
    """Whether device pointers may go to MPI on this node, and the reason."""

    works: bool
    why: str


def probe_gpu(limit: float = LIMIT_S, gpu: int | None = None) -> ProbeResult:
    """Probe a GPU. The result is cached: further calls in a process return that of the first.

    Args:
        limit: seconds after which the probe counts as failed.
        gpu: number of the GPU; None: the current GPU of this thread.
    """
    if device.simulated():
        return ProbeResult(False, "numba's simulator plays the GPU, and its memory has no device pointers")
    number = device.current_gpu() if gpu is None else gpu
    if number not in _RESULTS:
        _RESULTS[number] = _probe(number, limit)
    return _RESULTS[number]


_RESULTS: dict[int, ProbeResult] = {}
"""The results of this process, by GPU."""


def _probe(gpu: int, limit: float) -> ProbeResult:
    try:
        mpirun = find_mpirun()
    except (ConfigError, subprocess.SubprocessError, OSError) as error:
        return ProbeResult(False, f"it could not be started: {error}")
    program = [sys.executable, "-m", f"{__package__}.probe_program", str(math.ceil(limit))]
    return run([mpirun.path, "-n", "2", *program], {**surroundings(os.environ), DEVICE: str(gpu)}, limit)


def surroundings(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for a job of its own, started from inside a rank of another.

    What a launcher told this rank (its number, how to reach its daemon) would make the new job take part in the old
    one, and what a batch system says of its allocation would send the new job to other nodes. Settings stay: the
    probe has to find the MPI that the job runs with.
    """
    kept = {name: value for name, value in variables.items() if not name.startswith(_FOREIGN) or _is_setting(name)}
    return child_environment(2, kept)


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTINGS) and not name.startswith(_OF_THE_JOB)


def run(command: Sequence[str], environment: Mapping[str, str], limit: float) -> ProbeResult:
    """Run a probe: it passes if it ends in time, with status 0, and both of its processes report success."""
    # Files, not pipes: a process that outlives mpirun would hold a pipe open, and reading it would not end.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as log,
    ):
        try:
            # A session of its own: a signal to the job's terminal is not for the probe, and all of it can be killed.
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True
            )
        except OSError as error:
            return ProbeResult(False, f"it could not be started: {error}")
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            return ProbeResult(False, f"no answer within {limit:g} s")
        finally:
            _end(child)
        output.seek(0)
        log.seek(0)
        return _result(status, output.read(), log.read())


def _result(status: int, output: str, complaints: str) -> ProbeResult:
    if status == 0 and output.count(PASSED) == 2:
        return ProbeResult(True, "two processes on it sent each other GPU memory")
    said = next((line for line in complaints.splitlines() if line.startswith(PROBLEM)), None)
    if said:
        return ProbeResult(False, said.removeprefix(PROBLEM).strip())
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    last = next((line.strip() for line in reversed(complaints.splitlines()) if line.strip(" -*")), "no message")
    return ProbeResult(False, f"it ended with {ended}: {last}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let mpirun stop its processes, or else kill them; those that it put elsewhere end at their own alarm."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
