"""The first process of a lab: makes the hosts, starts mpirun on the first one, and waits for it.

`espresso_mpi.cluster.lab` starts it inside fresh namespaces. It is not for use by hand: it signals every process that
it sees and mounts over /dev/shm and /etc/hosts, so it refuses to run anywhere else.

    python -m espresso_mpi.cluster.lab_hosts ORDER PIPE COMMAND...

ORDER is JSON: the lab's shape, and the namespaces of who started it.
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
_ROOM = _SHARED_MEMORY / "espresso-lab"
_NETWORK = "10.77.0"
_CARD = "eth0"
_GRACE_S = 2.0
_BURST_S = 2e-3
_QUEUE = "50ms"

# Open MPI's launcher hangs now and then (1 in 10 for `true`) if all processes of a remote host end
# while it still starts them, so none may end at once.
_LATE = ("sh", "-c", 'sleep 0.2; exec "$@"', "sh")

_AGENT = """#!/bin/sh
# Stands in for ssh: runs the launcher's command on the host that it names.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter --net={room}/"$host".net --uts={room}/"$host".uts -- sh -c "$*"
"""


def main(spec: lab.Spec, owner: int, command: Sequence[str], outside: Mapping[str, str] | None = None) -> int:
    """Builds the lab, runs `command` on all its ranks, and returns its exit status.

    Args:
        owner: the reading end of a pipe; the lab ends when its other end closes.
        outside: the namespaces that `espresso_mpi.cluster.lab` itself is in; whoever cannot tell them is refused.

    Raises:
        LabUnavailable: this process is not the first one of namespaces of its own, or the lab cannot be built.
    """
    _require_own_namespaces(outside or {})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides; mpirun gets the terminal's Ctrl-C itself
    threading.Thread(target=_leave_with_owner, args=(owner,), daemon=True).start()
    _furnish(spec)
    for number in range(spec.hosts):
        _add_host(number, spec)
    job = [*_on(_name(0)), *_mpirun(launch.find_mpirun(), spec), *_LATE, *command]
    return _reap(subprocess.Popen(job, preexec_fn=_default_interrupt))


def _require_own_namespaces(outside: Mapping[str, str]) -> None:
    """Refuse where a signal to all, or a mount, would reach what is not the lab's."""
    inside = lab.namespaces()
    shared = [kind for kind in lab.NAMESPACES if outside.get(kind, inside[kind]) == inside[kind]]
    if os.getpid() != 1 or shared:
        first = "" if os.getpid() == 1 else f"; it is process {os.getpid()}, expected 1"
        same = f"; it shares the namespaces {', '.join(shared)} with who started it" if shared else ""
        raise LabUnavailable(
            f"espresso_mpi.cluster.lab_hosts is the first process of a lab and must run in namespaces of its own, "
            f"because it signals every process and mounts file systems{first}{same}; nothing was touched; start a lab "
            f"by espresso-mpi lab -- COMMAND"
        )


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave_with_owner(owner: int) -> None:
    """Ends the lab when the other end of the pipe closes, that is when the owner stops it or dies."""
    os.read(owner, 1)
    os.kill(-1, signal.SIGTERM)  # -1: every process of this namespace but this one
    time.sleep(_GRACE_S)
    os._exit(128 + signal.SIGTERM)


def _reap(job: subprocess.Popen[bytes]) -> int:
    """Waits for `job`; orphans become children of a first process and must be waited for too."""
    while True:
        pid, status = os.wait()
        if pid == job.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _do(*command: str) -> None:
    """Runs one step of the building.

    Raises:
        LabUnavailable: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailable(f"building the lab failed at `{' '.join(command)}`: {done.stderr.strip()}")


def _name(number: int) -> str:
    return f"host{number}"


def _on(host: str) -> list[str]:
    return ["nsenter", f"--net={_ROOM}/{host}.net", f"--uts={_ROOM}/{host}.uts", "--"]


def _furnish(spec: lab.Spec) -> None:
    """Gives the lab shared memory of its own, names for its hosts, the stand-in for ssh, and the switch."""
    _do("mount", "-t", "tmpfs", "tmpfs", str(_SHARED_MEMORY))
    _ROOM.mkdir()
    hosts = [f"{_NETWORK}.{n + 1} {_name(n)}" for n in range(spec.hosts)]
    (_ROOM / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    _do("mount", "--bind", str(_ROOM / "hosts"), "/etc/hosts")
    agent = _ROOM / "agent"
    agent.write_text(_AGENT.format(room=_ROOM))
    agent.chmod(0o755)
    _do("ip", "link", "add", "switch", "type", "bridge")
    _do("ip", "link", "set", "switch", "up")


def _add_host(number: int, spec: lab.Spec) -> None:
    """Makes one host and its cable to the switch, limited in both directions."""
    host, port = _name(number), f"port{number}"
    for kind in ("net", "uts"):
        (_ROOM / f"{host}.{kind}").touch()
    _do("unshare", f"--net={_ROOM}/{host}.net", f"--uts={_ROOM}/{host}.uts", "hostname", host)
    _do("ip", "link", "add", port, "type", "veth", "peer", "name", _CARD, "netns", f"{_ROOM}/{host}.net")
    _do("ip", "link", "set", port, "master", "switch", "up")
    _do(*_on(host), "ip", "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", _CARD)
    _do(*_on(host), "ip", "link", "set", _CARD, "up")
    _do(*_on(host), "ip", "link", "set", "lo", "up")
    if spec.rate != lab.UNLIMITED:
        _do(*_on(host), *_limit(_CARD, spec.rate))
        if spec.hosts > 2:  # with two hosts, the one sender's limit is the receiver's already
            _do(*_limit(port, spec.rate))


def _limit(device: str, rate: str) -> list[str]:
    """The command that limits what leaves `device`.

    The burst is what passes in `_BURST_S`: the kernel's timers are late by
    about that much when every core computes, and a late timer must find the
    tokens of the time that it missed. At least one 32 KiB segment must fit.
    """
    bits = lab.parse_rate(rate)
    burst = max(32 << 10, round(bits / 8 * _BURST_S))
    limits = ["rate", f"{round(bits)}bit", "burst", f"{burst}b", "latency", _QUEUE]
    return ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limits]


def _mpirun(mpirun: launch.Mpirun, spec: lab.Spec) -> list[str]:
    """mpirun with all its options: the hosts, the stand-in for ssh, and TCP between the hosts."""
    hosts = ",".join(f"{_name(n)}:{spec.ranks}" for n in range(spec.hosts))
    options = _open_mpi(hosts, spec.ranks) if mpirun.flavour == "Open MPI" else _mpich(hosts)
    return [mpirun.path, "-n", str(spec.size), *options]


def _open_mpi(hosts: str, ranks: int) -> list[str]:
    daemons = {"plm_ssh_agent": f"{_ROOM}/agent", "prte_tmpdir_base": str(_ROOM)}
    library = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": f"{_NETWORK}.0/24"}
    options = ["--host", hosts, "--map-by", f"ppr:{ranks}:node:oversubscribe", "--bind-to", "none"]
    for name, value in daemons.items():
        options += ["--prtemca", name, value]
    for name, value in library.items():
        options += ["--mca", name, value]
    return options


def _mpich(hosts: str) -> list[str]:
    # UCX would find shared memory between the "nodes", which do share the kernel.
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": _CARD, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": _CARD}
    options = ["-hosts", hosts, "-launcher", "ssh", "-launcher-exec", f"{_ROOM}/agent", "-iface", _CARD]
    for name, value in network.items():
        options += ["-genv", name, value]
    return options


def _run(arguments: Sequence[str]) -> int:
    """`main` from the command line."""
    if len(arguments) < 3:
        _require_own_namespaces({})
    order = json.loads(arguments[0])
    return main(lab.Spec(**order.get("spec", order)), int(arguments[1]), arguments[2:], order.get("outside"))


if __name__ == "__main__":
    try:
        sys.exit(_run(sys.argv[1:]))
    except LabUnavailable as error:
        print(f"espresso-mpi: {error}", file=sys.stderr)
        sys.exit(3)
