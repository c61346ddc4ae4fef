"""The commands ``profile``, ``plan``, ``explain`` and ``timeline``."""

from pathlib import Path
from typing import Annotated

import typer

from ..bench.defaults import Profile as Defaults
from ..errors import ConfigError
from .arguments import Compressors, ProfileOut, number, output_file, time_limit
from .program import app, profile


@profile.callback(invoke_without_command=True)
def measure_profile(
    context: typer.Context,
    output: ProfileOut = Path(Defaults.output),
    compressors: Compressors = Defaults.compressors,
    seconds: Annotated[float, time_limit("About how long it may take.")] = Defaults.seconds,
) -> None:
    """Measure every collective, encode and decode of this cluster, for the planner.

    [dim]espresso-mpi lab --nodes 2 --ranks 2 -- espresso-mpi profile -o profile.json[/dim]
    """
    if context.invoked_subcommand is None:
        from espresso_mpi.cli import profile

        profile.main(output=output, compressors=compressors, seconds=seconds)


@profile.command("show")
def show_profile(
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, or the name of a testbed.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what was measured and fitted to a PNG or SVG file.")
    ] = None,
) -> None:
    """Print what a profile holds: medians, spreads, fits and their errors."""
    from espresso_mpi.cli import profile_show

    profile_show.main(path, plot)


@profile.command("describe")
def describe_profile(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="TOML or JSON file, or the name of a testbed.")],
    output: ProfileOut = Path(Defaults.output),
) -> None:
    """Make a profile of nodes that are only described: links, memory, speeds of compressors."""
    from espresso_mpi.cli import profile_show

    profile_show.describe_main(cluster, output)


@app.command()
def plan(
    profile: Annotated[
        str,
        typer.Option(metavar="FILE", help="File of espresso-mpi profile, or a testbed: nvlink-100g, pcie-25g."),
    ],
    workload: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="File of session.record_workload; or a model: vgg16, resnet101, bert-base, …."
        ),
    ],
    compressors: Compressors = "fp16,int8",
    output: Annotated[Path, output_file("The plan to write.")] = Path("plan.json"),
    order: Annotated[
        str | None,
        typer.Option(metavar="ORDER", help="What a resource serves next: schedule, fifo, priority, backprop."),
    ] = None,
    lanes: Annotated[
        str | None, typer.Option(metavar="LANES", help="What shares a lane: separate, one-network, host or serial.")
    ] = None,
    error_budget: Annotated[
        float | None, typer.Option(min=0.0, metavar="E", help="Largest compression error of all tensors together.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|gpu", help="Where the tensors of a shipped model are; default: gpu.")
    ] = None,
    backward: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Measured time from the first gradient of a shipped model to its last."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step as PNG or SVG, or for Perfetto as JSON.")
    ] = None,
) -> None:
    """Choose for every tensor whether, where and how to compress it, and by which collectives. No MPI.

    [dim]espresso-mpi plan --profile profile.json --workload workload.json --compressors fp16,int8 -o plan.json[/dim]
    """
    from espresso_mpi.cli import plan as command

    command.plan_main(
        profile=profile, workload=workload, compressors=compressors, output=output, order=order, lanes=lanes,
        error_budget=error_budget, picture=picture, device=device, backward=backward,
    )  # fmt: skip


@app.command()
def explain(
    path: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="File of espresso-mpi plan.")] = None,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tensor.")] = None,
    program: Annotated[
        str | None, typer.Option(metavar="ROUTE", help="Instead of a plan: the table of operations of a route.")
    ] = None,
    compressor: Annotated[str, typer.Option(metavar="SPEC", help="With --program: the compressor.")] = "onebit",
    elements: Annotated[int, typer.Option(metavar="N", help="With --program: elements of the tensor.")] = 16384,
    nodes: Annotated[int, number("With --program: nodes.")] = 1,
    ranks: Annotated[int, number("With --program: ranks of each node.")] = 2,
    rank: Annotated[int, typer.Option(metavar="R", help="With --program: the rank.")] = 0,
) -> None:
    """Say what a plan chose and why; or, with --program, print what a rank does along a route.

    [dim]espresso-mpi explain --program flat-alltoall --compressor int8 --ranks 4[/dim]
    """
    if (path is None) == (program is None):
        raise ConfigError("explain: expected the file of a plan, or --program ROUTE, and not both")
    if program is not None:
        from espresso_mpi.cli import tables

        tables.main(program, compressor, elements, nodes, ranks, rank)
        return
    from espresso_mpi.cli import plan as command

    assert path is not None
    command.explain_main(path, tensor)


@app.command()
def timeline(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON file of session.trace or --trace.")],
    output: Annotated[Path | None, output_file("PNG or SVG; default: TRACE.svg beside it.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step to draw; default: the last.")] = None,
) -> None:
    """Draw one step of a trace: what every rank computed, sent and waited for.

    [dim]espresso-mpi timeline step.json -o step.png --step 3[/dim]
    """
    from espresso_mpi.tracing import pictures

    pictures.main(trace, output, step)
