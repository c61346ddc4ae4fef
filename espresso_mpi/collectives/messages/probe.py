"""Whether this MPI takes device pointers, found out by trying, where a crash does no harm: in a job of two processes.

An MPI that does not take them reads them as host addresses and crashes, or copies something else. What a library says
of itself does not settle it: Open MPI may be built with CUDA and have it switched off, or be built without and send by
a UCX that has it. So the probe starts ``mpirun -n 2`` on this node with the settings of this job and lets both
processes send each other GPU memory, in the way that ``transport`` does: non-blocking messages between two ranks, of
lengths on both sides of the limits at which MPI libraries change their protocol. Collectives of MPI are not tried, for
none is ever given GPU memory.

Messages between nodes go by another transport of the same library. So a second job has a process on every node, and
all pairs of them exchange messages in the same way. The launcher must be able to start it from inside the running job.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espresso_mpi.arrays import device
from espresso_mpi.cluster.launch import Mpirun, child_environment, find_mpirun
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
_LAUNCHING = ("PRTE_MCA_", "HYDRA_LAUNCHER", "HYDRA_IFACE", "SLURM_", "PBS_", "LSB_", "FLUX_", "COBALT_")
"""By these a launcher reaches other nodes."""
_OF_THE_JOB = (
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_cpu_type"),
    *("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
)
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_", "UCX_", "NUMBA_", "MPI4PY_", "FI_", DEVICE)
"""Variables that Open MPI does not take to other nodes by itself; MPICH's launcher takes all."""

_TALKING = {
    "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_btl_base_verbose": "5",
    "OMPI_MCA_accelerator_base_verbose": "10",
    "UCX_LOG_LEVEL": "info",
    "MPIR_CVAR_DEBUG_SUMMARY": "1",
}
"""Let the libraries say what they send by."""


@dataclass(frozen=True)
class ProbeResult:
    """Whether device pointers may go to MPI on this node, or between nodes, and the reason.

    Attributes:
        transport: what the library said that it sends by; empty if it said nothing that is known here.
    """

    works: bool
    why: str
    transport: str = ""

    def __str__(self) -> str:
        return f"{self.why}, by {self.transport}" if self.transport else self.why


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


def probe_nodes(hostnames: Sequence[str], limit: float = LIMIT_S, gpu: int | None = None) -> ProbeResult:
    """Probe messages between nodes, all pairs of ``hostnames`` once.

    Args:
        hostnames: a name of each node, by which the launcher reaches it; this node's first.
        limit, gpu: as in ``probe_gpu``; on every node, the GPU of this number is used.
    """
    if device.simulated():
        return ProbeResult(False, "numba's simulator plays the GPU, and its memory has no device pointers")
    return _probe(device.current_gpu() if gpu is None else gpu, limit, hostnames)


def _probe(gpu: int, limit: float, hostnames: Sequence[str] = ()) -> ProbeResult:
    """A job of two processes on this node, or of one on each of the nodes."""
    try:
        mpirun = find_mpirun()
    except (ConfigError, subprocess.SubprocessError, OSError) as error:
        return ProbeResult(False, f"it could not be started: {error}")
    environment = {**_TALKING, **surroundings(os.environ, bool(hostnames)), DEVICE: str(gpu)}
    program = [sys.executable, "-m", f"{__package__}.probe_program", str(math.ceil(limit))]
    processes = len(hostnames) or 2
    options = on_nodes(mpirun, hostnames, environment) if hostnames else []
    return run([mpirun.path, "-n", str(processes), *options, *program], environment, limit, processes)


def on_nodes(mpirun: Mpirun, hostnames: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The options that start one process on each node, in this order, with the environment."""
    if mpirun.flavour != "Open MPI":
        return ["-hosts", ",".join(hostnames), "-ppn", "1"]
    names = sorted(name for name in environment if name.startswith(_FORWARDED))
    return [
        *("--host", ",".join(f"{host}:1" for host in hostnames), "--map-by", "ppr:1:node:oversubscribe"),
        *(word for name in names for word in ("-x", name)),
    ]


def surroundings(variables: Mapping[str, str], elsewhere: bool = False) -> dict[str, str]:
    """The variables for a job of its own, started from inside a rank of another.

    What a launcher told this rank (its number, how to reach its daemon) would make the new job take part in the old
    one, and what a batch system says of its allocation would send the new job to other nodes. Settings stay: the
    probe has to find the MPI that the job runs with.

    Args:
        elsewhere: keep by what launchers reach other nodes: the job is to run there, too.
    """
    settings = (*_SETTINGS, *_LAUNCHING) if elsewhere else _SETTINGS

    def stays(name: str) -> bool:
        is_setting = name.startswith(settings) and not name.startswith(_OF_THE_JOB)
        return is_setting or not name.startswith(_FOREIGN)

    return child_environment(2, {name: value for name, value in variables.items() if stays(name)})


def run(command: Sequence[str], environment: Mapping[str, str], limit: float, processes: int = 2) -> ProbeResult:
    """Run a probe: it passes if it ends in time, with status 0, and all of its processes report success."""
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
        return _result(status, output.read(), log.read(), processes)


def _result(status: int, output: str, complaints: str, processes: int) -> ProbeResult:
    seen = transports(output + complaints)
    if status == 0 and output.count(PASSED) == processes:
        who = "two" if processes == 2 else f"all {processes * (processes - 1) // 2} pairs of {processes}"
        return ProbeResult(True, f"{who} processes sent each other GPU memory", seen)
    said = next((line for line in complaints.splitlines() if line.startswith(PROBLEM)), None)
    if said:
        return ProbeResult(False, said.removeprefix(PROBLEM).strip(), seen)
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in complaints.splitlines() if line.strip(" -*") and not _CHATTER.match(line)]
    return ProbeResult(False, f"it ended with {ended}: {lines[-1] if lines else 'no message'}", seen)


def transports(said: str) -> str:
    """What libraries said that they send by, given what they wrote because of ``_TALKING``.

    Example:
        >>> transports("[a:7] select: component ob1 selected\\n[a:7] mca: bml: Using sm btl for send to b on node a")
        'pml ob1, btl sm'
    """
    found = [f"{kind} {name}" for kind, pattern in _SAID for name in dict.fromkeys(pattern.findall(said))]
    return ", ".join(found)


_CHATTER = re.compile(r"\s*(?:\[[^\]]+:\d+\] (?:mca:|select|check:select|btl|selected )|\[\d+\.\d+\] .* UCX )")
"""Lines that libraries write because of ``_TALKING``: none is the reason of a failure."""

_SAID = (
    ("pml", re.compile(r"select: component (\w+) selected")),
    ("btl", re.compile(r"mca: bml: Using (?!self)(\w+) btl for send")),
    ("accelerator", re.compile(r"\] selected (?!null)(\w+)\s*$", re.MULTILINE)),
    ("UCX", re.compile(r"UCX +INFO .*?cfg(?:\[\d+\]:|#\d+) *(tag\([^)]*\))")),
    ("MPICH's provider", re.compile(r"^(?:libfabric )?provider: ([\w;]+)", re.MULTILINE)),
)
"""What a library says of Open MPI's components, UCX's lanes and MPICH's provider (of libfabric)."""


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
