"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

# What follows COMMAND belongs to it.
COMMAND_LAST = {"allow_interspersed_args": False}

Command = Annotated[
    list[str],
    typer.Argument(metavar="-- COMMAND…", help="The program to start on every rank; `python` is this one."),
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", help="Stop the job after this time, with exit status 124."),
]
Nodes = Annotated[int, typer.Option(metavar="N", help="Nodes to emulate, 1 to 8.")]
RanksPerNode = Annotated[int, typer.Option(metavar="R", help="Ranks on each node.")]
Rate = Annotated[str, typer.Option(metavar="RATE", help="Speed of each node's link: 100mbit, 1gbit, …, or unlimited.")]
JsonOut = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write an execution trace of some steps to FILE (JSON for Perfetto); one for each run.",
    ),
]

Compressors = Annotated[str, typer.Option(metavar="LIST", help="Compressors with their parameters; none is dense.")]
Sizes = Annotated[str, typer.Option(metavar="LIST", help="Sizes of the float32 array, with B, KiB, MiB or GiB.")]
TensorSizes = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Sizes of float32 arrays to use instead of ResNet-101's gradients."),
]
Repeats = Annotated[
    int, typer.Option(min=1, metavar="N", help="Largest number of timed repetitions of each method and size.")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="S", help="Begin no further repetition of a size after this time; three are always made."
    ),
]
