"""The first process of a lab: it creates the nodes, starts mpirun on the first one, and waits for it.

``espresso_mpi.cluster.lab`` starts it in new namespaces. It sends signals to every process that it sees, and mounts
over /dev/shm and /etc/hosts. It therefore refuses to run in namespaces that it shares with other processes.

    python -m espresso_mpi.cluster.lab_nodes REQUEST PIPE COMMAND...

REQUEST is JSON: the size of the lab, and the namespaces of the process that starts it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from espresso_mpi.cluster import lab, launch
from espresso_mpi.errors import LabUnavailable

_SHARED_MEMORY = Path("/dev/shm")
_FILES = _SHARED_MEMORY / "espresso-lab"
_NETWORK = "10.77.0"
_INTERFACE = "eth0"
_GRACE_S = 2.0
_BURST_S = 2e-3
_QUEUE = "50ms"

_SEGMENT_MAX = 1 << 16

# Open MPI's launcher sometimes hangs (1 in 10 for `true`) if all processes of a remote node end
# while it still starts them.
_DELAYED = ("sh", "-c", 'sleep 0.2; exec "$@"', "sh")

_AGENT = """#!/bin/sh
# In the place of ssh: runs the launcher's command on the given node.
while [ "${{1#-}}" != "$1" ]; do shift; done
name=$1
shift
exec nsenter --net={files}/"$name".net --uts={files}/"$name".uts -- sh -c "$*"
"""


def main(spec: lab.Spec, owner: int, command: Sequence[str], outside: Mapping[str, str] | None = None) -> int:
    """Create the lab, run a command on all its ranks, and return its exit status.

    Args:
        spec: the size of the lab.
        owner: the reading end of a pipe; the lab ends when the other end is closed.
        command: the program and its arguments.
        outside: the namespaces of the process that starts the lab; without them, the call is refused.

    Raises:
        LabUnavailable: this process is not the first one of its own namespaces, or the lab cannot be created.
    """
    _require_own_namespaces(outside or {})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides; mpirun gets the terminal's Ctrl-C itself
    threading.Thread(target=_end_with_owner, args=(owner,), daemon=True).start()
    _prepare(spec)
    for number in range(spec.nodes):
        _add_node(number, spec)
    job = [*_on(_name(0)), *_mpirun(launch.find_mpirun(), spec), *_DELAYED, *command]
    return _reap(subprocess.Popen(job, preexec_fn=_default_interrupt))


def _require_own_namespaces(outside: Mapping[str, str]) -> None:
    """Refuse to run where signals and mounts would affect processes outside of the lab."""
    inside = lab.namespaces()
    shared = [kind for kind in lab.NAMESPACES if outside.get(kind, inside[kind]) == inside[kind]]
    if os.getpid() != 1 or shared:
        first = "" if os.getpid() == 1 else f"; it is process {os.getpid()}, expected 1"
        same = f"; it shares the namespaces {', '.join(shared)} with who started it" if shared else ""
        raise LabUnavailable(
            f"espresso_mpi.cluster.lab_nodes is the first process of a lab and must run in its own namespaces, "
            f"because it signals every process and mounts file systems{first}{same}; nothing was touched; start a lab "
            f"by espresso-mpi lab -- COMMAND"
        )


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_owner(owner: int) -> None:
    """End the lab when the other end of the pipe is closed: the owner has closed it, or has ended."""
    os.read(owner, 1)
    os.kill(-1, signal.SIGTERM)  # -1: every process of this namespace but this one
    time.sleep(_GRACE_S)
    os._exit(128 + signal.SIGTERM)


def _reap(job: subprocess.Popen[bytes]) -> int:
    """Wait for the job. Orphans become children of the first process, which must wait for them as well."""
    while True:
        pid, status = os.wait()
        if pid == job.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _do(*command: str) -> None:
    """Run one command of the set-up.

    Raises:
        LabUnavailable: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailable(f"creating the lab failed at `{' '.join(command)}`: {done.stderr.strip()}")


def _name(number: int) -> str:
    return f"host{number}"


def _on(hostname: str) -> list[str]:
    return ["nsenter", f"--net={_FILES}/{hostname}.net", f"--uts={_FILES}/{hostname}.uts", "--"]


def _prepare(spec: lab.Spec) -> None:
    """Create the lab's shared memory, the names of its nodes, the replacement of ssh, and the bridge."""
    _do("mount", "-t", "tmpfs", "tmpfs", str(_SHARED_MEMORY))
    _FILES.mkdir()
    hosts = [f"{_NETWORK}.{n + 1} {_name(n)}" for n in range(spec.nodes)]
    (_FILES / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    _do("mount", "--bind", str(_FILES / "hosts"), "/etc/hosts")
    agent = _FILES / "agent"
    agent.write_text(_AGENT.format(files=_FILES))
    agent.chmod(0o755)
    _do("ip", "link", "add", "switch", "type", "bridge")
    _do("ip", "link", "set", "switch", "up")


def _add_node(number: int, spec: lab.Spec) -> None:
    """Create one node and its link to the bridge, with the rate limited in both directions."""
    hostname, port = _name(number), f"port{number}"
    for kind in ("net", "uts"):
        (_FILES / f"{hostname}.{kind}").touch()
    _do("unshare", f"--net={_FILES}/{hostname}.net", f"--uts={_FILES}/{hostname}.uts", "hostname", hostname)
    _do("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", f"{_FILES}/{hostname}.net")
    _do("ip", "link", "set", port, "master", "switch", "up")
    _do(*_on(hostname), "ip", "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", _INTERFACE)
    _do(*_on(hostname), "ip", "link", "set", _INTERFACE, "up")
    _do(*_on(hostname), "ip", "link", "set", "lo", "up")
    if spec.rate != lab.UNLIMITED:
        _do(*_on(hostname), *_limit(_INTERFACE, spec.rate))
        _do(*_on(hostname), "ip", "link", "set", _INTERFACE, "gso_max_size", str(_segment(spec.rate)))
        if spec.nodes > 2:  # between two nodes, the limit of the sender is enough
            _do(*_limit(port, spec.rate))


def _limit(device: str, rate: str) -> list[str]:
    """The command that limits the rate at which a device sends."""
    limits = ["rate", f"{round(lab.parse_rate(rate))}bit", "burst", f"{_burst(rate)}b", "latency", _QUEUE]
    return ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limits]


def _burst(rate: str) -> int:
    """Bytes that pass without limit after a pause: the data of ``_BURST_S``, at least 32 KiB.

    While all cores compute, the kernel's timers are late by about as much, and the tokens of this time must not be
    lost.
    """
    return max(32 << 10, round(lab.parse_rate(rate) / 8 * _BURST_S))


def _segment(rate: str) -> int:
    """The most bytes that TCP hands to a device at once: with the headers of all packets, they fit into the burst.

    Else the filter cuts them into packets, on a core that computes. In a real node, the network card does that.
    """
    return min(_SEGMENT_MAX, _burst(rate) * 15 // 16 - 1024)


def _mpirun(mpirun: launch.Mpirun, spec: lab.Spec) -> list[str]:
    """mpirun with its options: the nodes, the replacement of ssh, and TCP between the nodes."""
    hosts = ",".join(f"{_name(n)}:{spec.ranks}" for n in range(spec.nodes))
    options = _open_mpi(hosts, spec.ranks) if mpirun.flavour == "Open MPI" else _mpich(hosts)
    return [mpirun.path, "-n", str(spec.size), *options]


def _open_mpi(hosts: str, ranks: int) -> list[str]:
    daemons = {"plm_ssh_agent": f"{_FILES}/agent", "prte_tmpdir_base": str(_FILES)}
    library = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": f"{_NETWORK}.0/24"}
    options = ["--host", hosts, "--map-by", f"ppr:{ranks}:node:oversubscribe", "--bind-to", "none"]
    for name, value in daemons.items():
        options += ["--prtemca", name, value]
    for name, value in library.items():
        options += ["--mca", name, value]
    return options


def _mpich(hosts: str) -> list[str]:
    # The nodes share one kernel, so UCX would use shared memory between them.
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": _INTERFACE, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": _INTERFACE}
    options = ["-hosts", hosts, "-launcher", "ssh", "-launcher-exec", f"{_FILES}/agent", "-iface", _INTERFACE]
    for name, value in network.items():
        options += ["-genv", name, value]
    return options


def _run(arguments: Sequence[str]) -> int:
    """`main` from the command line."""
    if len(arguments) < 3:
        _require_own_namespaces({})
    request = json.loads(arguments[0])
    return main(lab.Spec(**request.get("spec", request)), int(arguments[1]), arguments[2:], request.get("outside"))


if __name__ == "__main__":
    try:
        sys.exit(_run(sys.argv[1:]))
    except LabUnavailable as error:
        print(f"espresso-mpi: {error}", file=sys.stderr)
        sys.exit(3)
