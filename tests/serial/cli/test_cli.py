"""The command line: help, versions, exit statuses and errors."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from espresso_mpi.cli import doctor, program
from espresso_mpi.cluster import lab, launch
from espresso_mpi.errors import ConfigError, GradientError, LabUnavailable

pytestmark = pytest.mark.timeout(60)

COMMANDS = [
    [],
    ["doctor"],
    ["run"],
    ["lab"],
    ["demo"],
    ["bench"],
    ["bench", "sync"],
    ["bench", "collectives"],
    ["bench", "routes"],
    ["bench", "compressors"],
    ["bench", "tensors"],
    ["bench", "overlap"],
    ["bench", "scaling"],
    ["bench", "train"],
    ["bench", "optimizers"],
    ["bench", "accuracy"],
    ["bench", "fidelity"],
    ["bench", "report"],
]


def invoke(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "espresso_mpi", *arguments], capture_output=True, text=True, timeout=50
    )


def invoke_here(monkeypatch, *arguments):
    """The exit status of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["espresso-mpi", *arguments])
    with pytest.raises(SystemExit) as left:
        program.main()
    return left.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command, monkeypatch, capsys):
    assert invoke_here(monkeypatch, *command, "--help") == 0
    assert "Usage" in capsys.readouterr().out


def test_help_loads_neither_numba_nor_mpi():
    code = (
        "import sys\nfrom espresso_mpi.cli import program as cli\n"
        "try: cli.app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numba', 'mpi4py', 'mpi4py.MPI', 'numpy', 'torch', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version():
    assert invoke("--version").stdout.strip() == f"espresso-mpi {version('espresso-mpi')}"


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run", "-n", "two", "--", "true"], ["lab"], ["run", "--nonsense"]]
)
def test_wrong_usage_exits_with_2(arguments, monkeypatch, capsys):
    assert invoke_here(monkeypatch, *arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("said"), 2), (GradientError("said"), 1), (LabUnavailable("said"), 3)]
)
def test_our_errors_are_one_message(monkeypatch, capsys, error, status):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(lab, "run", fail)
    assert invoke_here(monkeypatch, "lab", "--", "true") == status
    assert capsys.readouterr().err == "espresso-mpi: said\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(lab, "run", fail)
    monkeypatch.setattr(sys, "argv", ["espresso-mpi", "lab", "--", "true"])
    with pytest.raises(ZeroDivisionError):
        program.main()


def test_lab_passes_everything_on(monkeypatch):
    seen = {}
    monkeypatch.setattr(lab, "run", lambda command, **options: seen.update(options, command=command) or 7)
    arguments = [
        "--nodes",
        "3",
        "--ranks",
        "1",
        "--rate",
        "100mbit",
        "--timeout",
        "9",
        "--",
        "x",
        "--nodes",
        "y",
    ]
    assert invoke_here(monkeypatch, "lab", *arguments) == 7
    assert seen == {
        "nodes": 3,
        "ranks": 1,
        "rate": "100mbit",
        "timeout": 9.0,
        "command": ["x", "--nodes", "y"],
    }


def test_run_passes_everything_on(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run", lambda *arguments: seen.extend(arguments) or 0)
    assert invoke_here(monkeypatch, "run", "-n", "3", "--mpirun-options", "--verbose", "--", "x", "-n", "9") == 0
    assert seen == [["x", "-n", "9"], 3, None, "--verbose"]


def test_doctor_writes_its_file_where_told(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(doctor, "main", lambda path: seen.append(path) or 1)
    assert invoke_here(monkeypatch, "doctor", "--json", str(tmp_path / "d.json")) == 1
    assert seen == [tmp_path / "d.json"]


def test_an_error_on_one_rank_ends_all_ranks():
    code = (
        "import sys\nfrom mpi4py import MPI\n"
        "from espresso_mpi.cli import program as cli\nfrom espresso_mpi.cluster import lab\n"
        "from espresso_mpi.errors import StateError\n"
        "def fail(*a, **k):\n"
        "    if MPI.COMM_WORLD.rank == 1: raise StateError('rank 1 gives up')\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "lab.run = fail\nsys.argv = ['espresso-mpi', 'lab', '--', 'true']\ncli.main()"
    )
    done = invoke("run", "-n", "2", "--timeout", "40", "--", sys.executable, "-c", code)
    assert done.returncode not in (0, launch.TIMED_OUT)
    assert "rank 1 gives up" in done.stderr
