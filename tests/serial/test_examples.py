"""The programs of examples/ run, on two ranks and for a few steps."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

CASES = [
    ("train_numpy.py", "", ()),
    ("train_torch.py", "--way sync --steps 3 --width 16", ("torch",)),
    ("train_torch.py", "--way ddp --steps 3 --width 16", ("torch",)),
    ("train_torch.py", "--way fsdp --steps 3 --width 16", ("torch",)),
    ("train_lightning.py", "--epochs 1", ("torch", "lightning")),
    ("train_accelerate.py", "--steps 3 --width 16", ("torch", "accelerate", "transformers")),
    ("train_jax.py", "", ("jax", "optax")),
    ("partial_fit.py", "", ("sklearn",)),
]


def test_every_example_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == {name for name, _, _ in CASES}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "arguments", "needs"), CASES, ids=lambda value: str(value).split(" --steps")[0])
def test_an_example_runs(name, arguments, needs):
    missing = [module for module in needs if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    command = [sys.executable, "-m", "espresso_mpi", "run", "-n", "2", "--timeout", "500", "--"]
    command += ["python", "-m", "mpi4py", str(FOLDER / name), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0 and ("loss" in done.stdout or "accuracy" in done.stdout), done.stdout + done.stderr
