"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer


def comma_list(what: str) -> Any:
    """An option that takes several values with commas between them."""
    return typer.Option(metavar="LIST", help=what)


def number(what: str, least: int = 1) -> Any:
    """An option that takes a whole number."""
    return typer.Option(min=least, metavar="N", help=what)


def time_limit(what: str, least: float = 1.0) -> Any:
    """An option that takes a time."""
    return typer.Option(min=least, metavar="S", help=what)


def png(what: str) -> Any:
    """An option that takes the file for a plot."""
    return typer.Option(metavar="FILE", help=f"Draw {what} to a PNG file.")


def input_file(what: str) -> Any:
    """An option that takes a file that another call has written."""
    return typer.Option(metavar="FILE", help=what)


def output_file(what: str) -> Any:
    """An option that takes the file that a command writes."""
    return typer.Option("-o", "--output", metavar="FILE", help=what)


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
JsonKept = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Written after every run; runs that it holds are not repeated."),
]
ProfileOut = Annotated[Path, output_file("The profile to write.")]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write an execution trace of some steps to FILE (JSON for Perfetto); one for each run.",
    ),
]

Compressors = Annotated[str, comma_list("Compressors with their parameters; none is dense.")]
Sizes = Annotated[str, comma_list("Sizes of the float32 array, with B, KiB, MiB or GiB.")]
TensorSizes = Annotated[str | None, comma_list("Sizes of float32 arrays to use instead of ResNet-101's gradients.")]
Repeats = Annotated[int, number("Largest number of timed repetitions of each method and size.")]
Seconds = Annotated[
    float | None,
    time_limit("Begin no further repetition of a size after this time; three are always made.", least=0.0),
]
Route = Annotated[
    str | None, typer.Option(metavar="ROUTE", help="Route of the compressed methods; default: the session's choice.")
]

Trained = Annotated[str, comma_list("Compressors to train with in turn; none is fp32.")]
Steps = Annotated[int, number("Training steps of each run.")]
