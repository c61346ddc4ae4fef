"""The line that says that kernels are compiled: once, and only where they are."""

import importlib.util

from espresso_mpi.cli.compiling import NOTICE, announced

MODULE = """
from numba import njit

@njit(cache=True)
def one(x):
    return x + 1

@njit(cache=True)
def two(x):
    return one(x) + 1
"""


def used(path):
    """Loads the module anew, as another process would, and calls its kernels."""
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with announced():
        assert module.two(module.one(1)) == 4


def test_compiling_is_announced_once_and_cached_kernels_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(MODULE)
    used(path)
    found = capsys.readouterr()
    assert found.err == f"{NOTICE}\n" and not found.out
    used(path)
    assert capsys.readouterr().err == ""
