"""What an import costs, and that the metadata and the names of quick runs fit the tree."""

import ast
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("import espresso_mpi", ["numba", "mpi4py.MPI", "cupy", "torch", "numba.cuda"]),
        ("from espresso_mpi import Session", ["espresso_mpi.planner"]),  # only sessions with plans need it
    ],
)
def test_importing_loads_nothing_that_is_not_needed(line, heavy):
    code = f"import sys\n{line}\nloaded = set({heavy}) & set(sys.modules)\nassert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_resolve():
    import espresso_mpi

    for name in espresso_mpi.__all__:
        assert getattr(espresso_mpi, name) is not None


def test_the_metadata():
    known = metadata("espresso-mpi")
    assert known["Requires-Python"] == "<3.14,>=3.10"
    assert set(known.get_all("Provides-Extra")) >= {
        "openmpi",
        "mpich",
        "cuda12",
        "cuda13",
        "report",
        "test",
        "dev",
        "ptx",
    }


def test_the_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="espresso-mpi")
    assert command.value == "espresso_mpi.cli:main"


@pytest.mark.parametrize("layer", ["compressors", "collectives", "planner", "bench"])
def test_the_layers_are_shown_at_the_top(layer):
    link = ROOT / layer
    assert link.is_symlink()
    assert link.readlink() == Path("espresso_mpi") / layer
    assert (link / "__init__.py").exists()


def test_quick_runs_name_tests_that_exist():
    """A name that is left behind in RANKS would send its tests to the usual number of ranks."""
    folder = ROOT / "tests" / "mpi"
    (table,) = (
        node.value for node in ast.parse((folder / "conftest.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANKS"
    )  # fmt: skip
    for key in ast.literal_eval(table):
        module, _, test = key.partition("[")[0].partition("::")
        (path,) = folder.rglob(f"{module}.py")
        assert f"def {test}" in path.read_text(), key
