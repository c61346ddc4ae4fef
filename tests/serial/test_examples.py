"""The programs of examples/ run, on two ranks and for a few steps: in one job, one after the other."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_jobs import run_job

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "examples"

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


def missing(modules):
    return [module for module in modules if find_spec(module) is None]


def test_every_example_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == {name for name, _, _ in CASES}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each program printed that has what it needs; and what the job said of the one that failed."""
    wanted = [(name, arguments) for name, arguments, needs in CASES if not missing(needs)]
    results = tmp_path_factory.mktemp("examples") / "printed.json"
    programs = json.dumps([[str(FOLDER / name), *arguments.split()] for name, arguments in wanted])
    done = run_job("-m", "mpi4py", TESTS / "example_job.py", results, programs, limit=500)
    said = json.loads(results.read_text()) if results.exists() else []
    return dict(zip(wanted, said)), done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "arguments", "needs"), CASES, ids=lambda value: str(value).split(" --steps")[0])
def test_an_example_runs(printed, name, arguments, needs):
    if missing(needs):
        pytest.skip(f"{', '.join(missing(needs))} is not installed")
    texts, output = printed
    text = texts.get((name, arguments))
    assert text is not None, f"it failed, or one before it:\n{output}"
    assert "loss" in text or "accuracy" in text, text
    assert "1 % above" not in text, "a compressor that does not go with the optimizer"
