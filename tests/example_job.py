"""Runs the programs of examples/ one after the other on the ranks of one job, which imports each framework once.

python -m mpi4py example_job.py RESULTS COMMANDS; COMMANDS are lists of a program and its arguments, as JSON. Rank 0
writes into RESULTS what it printed for each. A program that fails ends the job.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mpi4py import MPI

COMM = MPI.COMM_WORLD


def run(program: str, *arguments: str) -> str:
    """What the program prints on this rank."""
    sys.argv, out = [program, *arguments], io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        runpy.run_path(program, run_name="__main__")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():  # Lightning leaves its group to the end of the process
        distributed.destroy_process_group()
    return out.getvalue()


def main() -> None:
    results, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
    printed = []
    for command in commands:
        printed.append(run(*command))
        COMM.barrier()
        if COMM.rank == 0:
            results.write_text(json.dumps(printed))


if __name__ == "__main__":
    main()
