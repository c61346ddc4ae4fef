"""`espresso-mpi warmup`: compiles what sessions need, and keeps it on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from espresso_mpi import compressors as methods
from espresso_mpi.cluster import launch
from espresso_mpi.cluster.launched import claim
from espresso_mpi.files.output import progress
from espresso_mpi.session import Session

_RANKS = 2
_SIZES = (1000, 300_000, 3_000_000)
"""Elements of arrays that take other kernels: for one thread, for several, and in segments."""


def main(compressors: str) -> int:
    """Compile in a job of ranks, which this starts if it is not in one.

    Args:
        compressors: comma list of specs; ``all`` for every method with its defaults.
    """
    specs = list(methods.names()) if compressors == "all" else methods.read_specs(compressors)
    if claim() is None:
        command = ["python", "-m", "mpi4py", "-m", "espresso_mpi", "warmup", "--compressors", compressors]
        return launch.run(command, _RANKS)
    _compile(specs)
    return 0


def _compile(specs: Sequence[str]) -> None:
    from mpi4py import MPI

    world, start = MPI.COMM_WORLD, time.perf_counter()
    layouts = [None, [[rank] for rank in range(world.size)]]  # all ranks on one node, and each on its own
    with progress("compiling", len(specs) * len(layouts), world.rank == 0) as tick:
        for spec in dict.fromkeys(["none", *specs]):
            for nodes in layouts:
                with Session(compressor=spec, min_bytes=0, nodes=nodes) as session:
                    session.judge_for(None)
                    for dtype in ("float32", "float16", "float64"):
                        for _ in range(2):  # a call that was made before may take the fast path
                            session.sync({str(n): np.ones(n, dtype) for n in _SIZES})
                tick()
        with Session(compressor="fp16", route="hierarchical-allgather", min_bytes=0) as session:
            session.sync({str(n): np.ones(n, np.float32) for n in (1000, 2000)})  # they share messages inside a node
        with Session(compressor="fp16", min_bytes=0) as session:
            for _ in range(2):  # a small call that is made again is a kernel of its own
                session.sync(np.ones(1000, np.float32))
    if world.rank == 0:
        compile_planner()
        print(
            f"kernels of {len(specs)} compressors and of the planner are on disk: {time.perf_counter() - start:.1f} s"
        )


def compile_planner() -> None:
    """Compile the kernels of the planner, by a small plan."""
    from espresso_mpi.planner import TESTBEDS, model_workload, plan

    plan(model_workload("lstm"), TESTBEDS["pcie-25g"].profile(), ["fp16", "int8"])
