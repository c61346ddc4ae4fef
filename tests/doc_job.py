"""Runs the blocks of all pages, and the examples of public docstrings, on the ranks of one job.

python -m mpi4py doc_job.py FOLDER; rank 0 writes what failed to problems.json.
"""

from __future__ import annotations

import doctest
import json
import os
import shlex
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from doc_blocks import DOCUMENTED, PAGES, ROOT, STARTS_RANKS, Block, blocks
from mpi4py import MPI
from patience import patient_barrier
from typer.testing import CliRunner

import espresso_mpi
from espresso_mpi.cli.program import app

COMM = MPI.COMM_WORLD


def given(page_blocks: list[Block]) -> dict[str, Any]:
    """The names that the pages take for granted: a model, its gradients, and a session."""
    own = np.random.default_rng([7, COMM.rank])

    def gradients(model: Any, batch: Any) -> dict[str, np.ndarray]:
        return {name: own.standard_normal(w.shape, np.float32) for name, w in model.items()}

    def update(model: Any, grads: Any) -> None:
        for name, grad in grads.items():
            model[name] -= np.float32(0.1) * grad

    model = {"w": np.ones((128, 256), np.float32), "b": np.ones(256, np.float32)}
    grads = gradients(model, None)
    names = {
        "espresso_mpi": espresso_mpi, "np": np, "model": model, "params": model, "batches": list(range(12)), "batch": 0,
        "gradients": gradients, "update": update, "grads": grads, "dw": grads["w"].copy(), "db": grads["b"].copy(),
        "backward": lambda model, batch: reversed(gradients(model, batch).items()),
    }  # fmt: skip
    if any("session" in block.text for block in page_blocks if block.language in ("python", "hidden")):
        names["session"] = espresso_mpi.Session(compressor="int8")
    return names


def run_block(block: Block, names: dict[str, Any]) -> None:
    if block.language == "console":
        for command in block.commands if COMM.rank == 0 else []:
            program, *arguments = shlex.split(command)
            assert program == "espresso-mpi", f"{command}: only espresso-mpi is run; mark others with 'not run'"
            if arguments[0] not in STARTS_RANKS:
                done = CliRunner().invoke(app, arguments)
                assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
    else:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)


def problem_of(block: Block, names: dict[str, Any]) -> str | None:
    """What went wrong on any rank; all ranks hear the same."""
    problem = None
    if "file" in block.marks and COMM.rank == 0:
        Path(block.marks["file"]).write_text(block.text)
    if block.runs and ("needs" not in block.marks or find_spec(block.marks["needs"])):
        try:
            run_block(block, names)
        except Exception:
            problem = f"{block.page}:{block.line}, rank {COMM.rank}: {traceback.format_exc()}"
    patient_barrier(COMM)  # rank 0 runs commands alone
    return next(filter(None, COMM.allgather(problem)), None)


def run_page(page: str, folder: Path) -> str | None:
    """Run a page in a folder of its own, up to the first block that fails."""
    found = blocks(page)
    if not any(block.runs for block in found):
        return None
    home = folder / page.replace("/", "-")
    if COMM.rank == 0:
        home.mkdir()
        (home / "examples").symlink_to(ROOT / "examples")
    COMM.barrier()
    os.chdir(home)
    names = given(found)
    problem = next(filter(None, (problem_of(block, names) for block in found)), None)
    session = names.get("session")
    if problem is None and session is not None and session.usable:
        session.close()
    return problem


def run_examples(name: str) -> str | None:
    """Run the examples in the docstring of a public name; what went wrong on any rank."""
    names = {"espresso_mpi": espresso_mpi, "np": np}
    tests = doctest.DocTestFinder(recurse=False).find(DOCUMENTED[name], name, globs=names)
    text: list[str] = []
    for test in tests:
        doctest.DocTestRunner().run(test, out=text.append)
    return next(filter(None, COMM.allgather("".join(text))), None)


def main() -> None:
    folder = Path(sys.argv[1])
    problems = {page: run_page(page, folder) for page in PAGES}
    os.chdir(folder)
    problems |= {name: run_examples(name) for name in DOCUMENTED}
    if COMM.rank == 0:
        (folder / "problems.json").write_text(json.dumps(problems))


if __name__ == "__main__":
    main()
