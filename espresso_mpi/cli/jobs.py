"""The commands ``doctor``, ``run``, ``lab`` and ``demo``."""

from pathlib import Path
from typing import Annotated

import typer

from ..bench.defaults import GpuCheck as GpuDefaults
from ..bench.defaults import Warmup
from .arguments import COMMAND_LAST, Command, JsonOut, Nodes, RanksPerNode, Rate, Timeout, comma_list, png
from .program import app


@app.command()
def doctor(json: JsonOut = None) -> None:
    """Check MPI, threads, GPUs and packages; name every problem and its cure.

    Works on one process and under mpirun. Exit status 1 if something would
    keep the library from working.
    """
    from espresso_mpi.cli import doctor

    raise typer.Exit(doctor.main(json))


@app.command()
def warmup(
    compressors: Annotated[
        str, comma_list("Compressors whose kernels are compiled; all for every method.")
    ] = Warmup.compressors,
) -> None:
    """Compile kernels ahead and keep them on disk, so that a first step does not wait for it. Once on each node.

    [dim]espresso-mpi warmup --compressors int8,onebit[/dim]
    """
    from espresso_mpi.cli import warmup

    raise typer.Exit(warmup.main(compressors))


@app.command("gpu-check")
def gpu_check(
    only: Annotated[str, comma_list("Parts to try.")] = GpuDefaults.only,
    json: JsonOut = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the report to FILE as Markdown.")
    ] = None,
    plot: Annotated[Path | None, png("the kernels' shares of the bound by memory, and what push hides,")] = None,
) -> None:
    """Try every promise of the GPU support on this node's GPU, and report a result for each (ten minutes).

    [dim]espresso-mpi gpu-check --output gpu.md --plot gpu.png[/dim]
    """
    from espresso_mpi.bench.gpu import suite

    raise typer.Exit(suite.main(only=only, json=json, output=output, plot=plot))


@app.command(context_settings=COMMAND_LAST)
def run(
    command: Command,
    ranks: Annotated[int, typer.Option("-n", "--ranks", metavar="N", help="Ranks to start on this node.")] = 2,
    timeout: Timeout = None,
    mpirun_options: Annotated[str, typer.Option(metavar="TEXT", help="More options for mpirun, in quotes.")] = "",
) -> None:
    """Start COMMAND under the mpirun that belongs to this installation.

    [dim]espresso-mpi run -n 4 -- python -m mpi4py train.py[/dim]
    """
    from espresso_mpi.cluster import launch

    raise typer.Exit(launch.run(command, ranks, timeout, mpirun_options))


@app.command(context_settings=COMMAND_LAST)
def lab(
    command: Command,
    nodes: Nodes = 2,
    ranks: RanksPerNode = 2,
    rate: Rate = "1gbit",
    timeout: Timeout = None,
) -> None:
    """Start COMMAND on an emulated cluster on this node (Linux).

    [dim]espresso-mpi lab --nodes 2 --ranks 2 --rate 1gbit -- python -m mpi4py train.py[/dim]
    """
    from espresso_mpi.cluster import lab

    raise typer.Exit(lab.run(command, nodes=nodes, ranks=ranks, rate=rate, timeout=timeout))


@app.command()
def demo() -> None:
    """Train a small model with and without compression, on the lab if it can run (three minutes)."""
    from espresso_mpi.cli import demo

    raise typer.Exit(demo.main())
