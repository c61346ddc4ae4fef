"""The command `espresso-mpi`.

Every command imports what it needs only when it runs, so that `--help` is
quick and loads neither numba nor MPI.
"""

import sys
import traceback
from typing import Annotated

import typer

from espresso_mpi.errors import ConfigError, EspressoError, LabUnavailable

USER_ERROR, USAGE_ERROR, LAB_UNAVAILABLE = 1, 2, 3

app = typer.Typer(
    name="espresso-mpi",
    help="Compressed gradient synchronisation over MPI: check the node, emulate a cluster, measure.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure synchronisation and training, and report.", no_args_is_help=True)
app.add_typer(bench, name="bench")
profile = typer.Typer(help="Measure this cluster for the planner; show or describe profiles.")
app.add_typer(profile, name="profile")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"espresso-mpi {_installed_version()}")
        raise typer.Exit


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("espresso-mpi")
    except PackageNotFoundError:
        return "(not installed; install it with: pip install -e .)"


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Compressed gradient synchronisation over MPI: check the node, emulate a cluster, measure."""


def main() -> None:
    """The entry point: errors become one clear message, and a failing rank takes the others with it."""
    try:
        app()
    except EspressoError as error:
        sys.exit(_report(error))
    except Exception:
        _abort_all_ranks(USER_ERROR, traceback.format_exc())
        raise


def _report(error: EspressoError) -> int:
    print(f"espresso-mpi: {error}", file=sys.stderr)
    code = USAGE_ERROR if isinstance(error, ConfigError) else USER_ERROR
    code = LAB_UNAVAILABLE if isinstance(error, LabUnavailable) else code
    _abort_all_ranks(code, "")
    return code


def _abort_all_ranks(code: int, last_words: str) -> None:
    """Ends the whole job if this is one rank of several: the others would wait for this one for ever."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.size == 1:
        return
    print(last_words, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    module.COMM_WORLD.Abort(code)
