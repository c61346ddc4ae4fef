"""The emulated cluster: its shape, its speed, and that nothing of it stays behind."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import until

from espresso_mpi.cluster import lab, launch
from espresso_mpi.errors import ConfigError, LabUnavailable

pytestmark = pytest.mark.timeout(300)

WHY_NOT = "; ".join(lab.problems())
needs_lab = pytest.mark.skipif(bool(WHY_NOT), reason=f"the lab cannot run: {WHY_NOT}")

SHAPE = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
shared = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = (socket.gethostname(), shared.size, os.environ["ESPRESSO_LAB"], os.environ["ESPRESSO_TEST"])
everyone = world.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone))
"""

ALLREDUCE = """
import json, time
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
x = np.ones(4 << 20, np.float32)
y = np.empty_like(x)
times = []
for _ in range(3):
    world.Barrier()
    start = time.perf_counter()
    world.Allreduce(x, y)
    times.append(time.perf_counter() - start)
if world.rank == 0:
    print(json.dumps(times))
"""

STREAM = """
import json, socket, time
from mpi4py import MPI
world = MPI.COMM_WORLD
SIZE = 24_000_000
if world.rank == 0:
    listener = socket.create_server(("0.0.0.0", 5001))
    world.Barrier()
    peer, _ = listener.accept()
    start, got = time.perf_counter(), 0
    while data := peer.recv(1 << 20):
        got += len(data)
    print(json.dumps([got, time.perf_counter() - start]))
else:
    world.Barrier()
    with socket.create_connection(("host0", 5001)) as peer:
        peer.sendall(bytes(SIZE))
"""


def run_in_lab(program, nodes=2, ranks=2, rate="1gbit"):
    """The JSON that rank 0 of `program` prints in a lab."""
    argv = [
        sys.executable,
        "-m",
        "espresso_mpi",
        "lab",
        f"--nodes={nodes}",
        f"--ranks={ranks}",
        f"--rate={rate}",
    ]
    done = subprocess.run(
        [*argv, "--timeout=60", "--", "python", "-m", "mpi4py", "-c", program],
        env={**os.environ, "ESPRESSO_TEST": "from outside"},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


def processes(marker):
    """The ids of the processes whose command line contains `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(int(entry.name))
    return found


TWO_BY_TWO = {"nodes": 2, "ranks": 2, "rate": "1gbit"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"nodes": 0}, "nodes must be 1 to 8, got 0"),
        ({"nodes": 9}, "nodes must be 1 to 8, got 9"),
        ({"ranks": 0}, "ranks per node must be 1 to 64, got 0"),
        ({"rate": "fast"}, "got 'fast'"),
        ({"rate": "1gbit; reboot"}, "got '1gbit; reboot'"),
        ({"rate": "10kbit"}, "from 1mbit to 100gbit"),
        ({"rate": "0mbit"}, "from 1mbit to 100gbit"),
    ],
)
def test_refuses_a_shape_out_of_range(arguments, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        lab.run(["true"], **{**TWO_BY_TWO, **arguments})


def test_refuses_an_empty_command():
    with pytest.raises(ConfigError, match="no command given"):
        lab.run([], **TWO_BY_TWO)


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("2000kbit", 2e6)])
def test_parses_rates(text, rate):
    assert lab.parse_rate(text) == rate


def test_missing_programs_are_named_with_their_package(monkeypatch):
    monkeypatch.setattr(launch, "search_path", lambda: "/nonexistent")
    problems = "\n".join(lab.problems())
    assert "`tc` is missing; install the package iproute2" in problems
    assert "no mpirun found" in problems
    with pytest.raises(LabUnavailable, match="iproute2"):
        lab.run(["true"], **TWO_BY_TWO)


@pytest.mark.parametrize(("user", "cure"), [(0, "--privileged"), (1000, "kernel.unprivileged_userns_clone=1")])
def test_forbidden_namespaces_name_the_cure(monkeypatch, user, cure):
    refusal = ["sh", "-c", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1", "sh"]
    monkeypatch.setattr(lab, "_new_namespaces", lambda: refusal)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (problem,) = lab._kernel_problems()
    assert "Operation not permitted" in problem
    assert cure in problem


def test_a_missing_kernel_module_is_named(monkeypatch):
    monkeypatch.setattr(lab, "_new_namespaces", lambda: ["env"])
    monkeypatch.setattr(lab, "_PROBES", (("limit a rate; load the kernel module `sch_tbf`", "false"),))
    assert lab._kernel_problems() == ["cannot limit a rate; load the kernel module `sch_tbf`"]


def test_an_old_open_mpi_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: launch.Mpirun("/usr/bin/mpirun", "Open MPI", "4.1.6"))
    assert "Open MPI 4.1.6" in lab.problems()[0]


@pytest.mark.parametrize("pid", [4711, 1], ids=["not the first process", "first process of a container"])
@pytest.mark.parametrize("tells", [False, True], ids=["by hand", "no namespaces of its own"])
def test_the_labs_helper_refuses_to_run_elsewhere(monkeypatch, capsys, tells, pid):
    """Whatever could do harm is replaced by a note of it: a helper that goes on must not end the tests."""
    done = []

    def note(name):
        return lambda *arguments, **options: done.append((name, arguments))

    class Popen:
        __class_getitem__ = classmethod(lambda cls, item: cls)
        __init__ = note("Popen")

    for module, name in [(os, "kill"), (signal, "signal"), (threading, "Thread"), (subprocess, "run")]:
        monkeypatch.setattr(module, name, note(name))
    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(os, "getpid", lambda: pid)
    order = {"spec": {"nodes": 2, "ranks": 1, "rate": "unlimited"}, "outside": lab.namespaces() if tells else {}}
    watched, held = os.pipe()
    monkeypatch.setattr(sys, "argv", ["lab_nodes", json.dumps(order), str(watched), "true"])
    monkeypatch.delitem(sys.modules, "espresso_mpi.cluster.lab_nodes", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("espresso_mpi.cluster.lab_nodes", run_name="__main__")
    os.close(watched)
    os.close(held)
    said = capsys.readouterr().err
    assert (end.value.code, done) == (3, [])
    assert "in its own namespaces" in said and "nothing was touched" in said and "espresso-mpi lab" in said


@needs_lab
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 1)])
def test_mpi_sees_the_nodes(nodes, ranks):
    expected = [
        [f"host{h}", ranks, f"nodes={nodes} ranks={ranks} rate=unlimited", "from outside"]
        for h in range(nodes)
        for _ in range(ranks)
    ]
    assert run_in_lab(SHAPE, nodes, ranks, "unlimited") == expected


@needs_lab
def test_a_stream_runs_at_the_rate():
    """No stream is faster; one is as fast, unless other load on this node slows them all."""

    def at_the_rate():
        size, seconds = run_in_lab(STREAM, 2, 1, "200mbit")
        assert size == 24_000_000
        # TCP and IP headers take 4 % of the wire; the burst gives a little back.
        assert size * 8 / seconds < 202e6
        return size * 8 / seconds > 180e6

    assert until(at_the_rate, seconds=120)


@needs_lab
def test_an_allreduce_takes_as_long_as_the_wire_needs():
    # 16 MiB cross each link once per direction: 134 ms at 1 Gbit/s. Other load on this node may slow it.
    assert min(run_in_lab(ALLREDUCE)) > 0.12


@needs_lab
def test_the_commands_status_is_returned():
    assert lab.run(["sh", "-c", "exit 7"], nodes=2, ranks=1, rate="unlimited", timeout=60) == 7


@needs_lab
def test_the_time_limit_ends_the_lab():
    marker = f"sleep 3100{os.getpid()}"
    assert lab.run(marker.split(), nodes=2, ranks=1, rate="unlimited", timeout=3) == launch.TIMED_OUT
    assert processes(marker) == []


@needs_lab
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_nothing_stays_behind_after_a_signal(number, status):
    marker = f"sleep 32{os.getpid()}{int(number)}"
    owner = subprocess.Popen(
        [sys.executable, "-m", "espresso_mpi", "lab", "--rate=unlimited", "--", *marker.split()],
        stderr=subprocess.DEVNULL,
        # Whoever starts the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        # The owner, unshare, the lab's first process, nsenter and mpirun show the command, and so do 4 ranks.
        assert until(lambda: len(processes(marker)) >= 8, every=0.05)
        owner.send_signal(number)
        assert owner.wait(20) == status
        # The namespaces, their devices and mounts live as long as a process in them.
        assert until(lambda: processes(marker) == [], every=0.05)
    finally:
        owner.kill()
        owner.wait()


@needs_lab
def test_two_labs_run_at_once():
    argv = [sys.executable, "-m", "espresso_mpi", "lab", "--rate=unlimited", "--timeout=60", "--"]
    program = ["python", "-m", "mpi4py", "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
    both = [subprocess.Popen([*argv, *program]) for _ in range(2)]
    assert [each.wait(80) for each in both] == [0, 0]


@needs_lab
def test_devices_and_mounts_outside_are_untouched():
    def outside():
        devices = sorted(os.listdir("/sys/class/net"))
        return devices, Path("/proc/self/mounts").read_text(), os.uname().nodename

    before = outside()
    assert lab.run(["true"], nodes=2, ranks=1, rate="100mbit", timeout=60) == 0
    assert outside() == before
