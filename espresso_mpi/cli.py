"""The command `espresso-mpi`.

Every command imports what it needs only when it runs, so that `--help` is
quick and loads neither numba nor MPI.
"""

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from espresso_mpi.errors import ConfigError, EspressoError, LabUnavailable

USER_ERROR, USAGE_ERROR, LAB_UNAVAILABLE = 1, 2, 3

app = typer.Typer(
    name="espresso-mpi",
    help="Compressed gradient synchronisation over MPI: check the machine, emulate a cluster, measure.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure synchronisation and training, and report.", no_args_is_help=True)
app.add_typer(bench, name="bench")
profile = typer.Typer(help="Measure this cluster for the planner; show or describe profiles.")
app.add_typer(profile, name="profile")

# What follows COMMAND belongs to it.
_COMMAND_LAST = {"allow_interspersed_args": False}

Command = Annotated[
    list[str],
    typer.Argument(metavar="-- COMMAND…", help="The program to start on every rank; `python` is this one."),
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", help="Stop the job after this time, with exit status 124."),
]
Hosts = Annotated[int, typer.Option(metavar="H", help="Machines to emulate, 1 to 8.")]
RanksPerHost = Annotated[int, typer.Option(metavar="R", help="Ranks on each machine.")]
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Speed of each machine's link: 100mbit, 1gbit, …, or unlimited.")
]
JsonOut = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")]
TraceOut = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Trace some steps to FILE (JSON for Perfetto); one for each run."),
]

Compressors = Annotated[str, typer.Option(metavar="LIST", help="Compressors with their parameters; none is dense.")]
Sizes = Annotated[str, typer.Option(metavar="LIST", help="Sizes of the float32 array, with B, KiB, MiB or GiB.")]
TensorSizes = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Sizes of float32 arrays in the place of ResNet-101's gradients."),
]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Most timed repetitions of each method and size.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="S", help="Time for each size after which no repetition is begun, but for the first three."
    ),
]

DEFAULT_COMPRESSORS = "none,fp16,int8,onebit,topk:ratio=0.01"


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
    """Compressed gradient synchronisation over MPI: check the machine, emulate a cluster, measure."""


@app.command()
def doctor(json: JsonOut = None) -> None:
    """Check MPI, threads, GPUs and packages; name every problem and its cure.

    Works on one process and under mpirun. Exit status 1 if something would
    keep the library from working.
    """
    from espresso_mpi import doctor

    raise typer.Exit(doctor.main(json))


@app.command(context_settings=_COMMAND_LAST)
def run(
    command: Command,
    ranks: Annotated[int, typer.Option("-n", "--ranks", metavar="N", help="Ranks to start on this machine.")] = 2,
    timeout: Timeout = None,
    mpirun_options: Annotated[str, typer.Option(metavar="TEXT", help="More options for mpirun, in quotes.")] = "",
) -> None:
    """Start COMMAND under the mpirun that belongs to this installation.

    [dim]espresso-mpi run -n 4 -- python -m mpi4py train.py[/dim]
    """
    from espresso_mpi import launch

    raise typer.Exit(launch.run(command, ranks, timeout, mpirun_options))


@app.command(context_settings=_COMMAND_LAST)
def lab(
    command: Command,
    hosts: Hosts = 2,
    ranks: RanksPerHost = 2,
    rate: Rate = "1gbit",
    timeout: Timeout = None,
) -> None:
    """Start COMMAND on an emulated cluster on this machine (Linux).

    [dim]espresso-mpi lab --hosts 2 --ranks 2 --rate 1gbit -- python -m mpi4py train.py[/dim]
    """
    from espresso_mpi import lab

    raise typer.Exit(lab.run(command, hosts=hosts, ranks=ranks, rate=rate, timeout=timeout))


@app.command()
def demo() -> None:
    """Train a small model with and without compression, on the lab if it can run (three minutes)."""
    from espresso_mpi.bench import demo

    raise typer.Exit(demo.main())


@profile.callback(invoke_without_command=True)
def measure_profile(
    context: typer.Context,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The profile to write.")] = Path(
        "profile.json"
    ),
    compressors: Compressors = "fp16,int8,onebit,topk:ratio=0.01",
    seconds: Annotated[float, typer.Option(min=1.0, metavar="S", help="About how long it may take.")] = 60.0,
) -> None:
    """Measure every collective, encode and decode of this cluster, for the planner.

    [dim]espresso-mpi lab --hosts 2 --ranks 2 -- espresso-mpi profile -o profile.json[/dim]
    """
    if context.invoked_subcommand is None:
        from espresso_mpi.bench import profile

        profile.main(output=output, compressors=compressors, seconds=seconds)


@profile.command("show")
def show_profile(
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, or the name of a testbed.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what was measured and fitted to a PNG or SVG file.")
    ] = None,
) -> None:
    """Print what a profile holds: medians, spreads, fits and their errors."""
    from espresso_mpi.bench import profile_show

    profile_show.main(path, plot)


@profile.command("describe")
def describe_profile(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="TOML or JSON file, or the name of a testbed.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The profile to write.")] = Path(
        "profile.json"
    ),
) -> None:
    """Make a profile of machines that are only described: links, memory, speeds of compressors."""
    from espresso_mpi.bench import profile_show

    profile_show.describe_main(cluster, output)


@app.command()
def plan(
    profile: Annotated[
        str,
        typer.Option(metavar="FILE", help="Of espresso-mpi profile, or a testbed: nvlink-100g, pcie-25g."),
    ],
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Of session.record_trace; or a model: vgg16, resnet101, bert-base, ….")
    ],
    compressors: Compressors = "fp16,int8",
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The plan to write.")] = Path(
        "plan.json"
    ),
    order: Annotated[
        str | None,
        typer.Option(metavar="ORDER", help="What a resource serves next: schedule, fifo, priority, backprop."),
    ] = None,
    lanes: Annotated[
        str | None, typer.Option(metavar="LANES", help="What shares a lane: separate, one-network, host or serial.")
    ] = None,
    error_budget: Annotated[
        float | None, typer.Option(min=0.0, metavar="E", help="Most compression error of all tensors together.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|gpu", help="Where the tensors of a shipped model are; default: gpu.")
    ] = None,
    backward: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Measured time from a shipped model's first gradient to its last."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step as PNG or SVG, or for Perfetto as JSON.")
    ] = None,
) -> None:
    """Choose for every tensor whether, where and how to compress it, and by which collectives. No MPI.

    [dim]espresso-mpi plan --profile profile.json --trace trace.json --compressors fp16,int8 -o plan.json[/dim]
    """
    from espresso_mpi.bench import plan as command

    command.plan_main(
        profile=profile, trace=trace, compressors=compressors, output=output, order=order, lanes=lanes,
        error_budget=error_budget, picture=picture, device=device, backward=backward,
    )  # fmt: skip


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="File of espresso-mpi plan.")],
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tensor.")] = None,
) -> None:
    """Say what a plan chose and why: predicted times, what is hidden, runners-up and their margins."""
    from espresso_mpi.bench import plan as command

    command.explain_main(path, tensor)


@app.command()
def timeline(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON file of session.trace or --trace.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="PNG or SVG; default: TRACE.svg beside it.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step to draw; default: the last.")] = None,
) -> None:
    """Draw one step of a trace: what every rank computed, sent and waited for.

    [dim]espresso-mpi timeline step.json -o step.png --step 3[/dim]
    """
    from espresso_mpi.bench import timeline

    timeline.main(trace, output, step)


@bench.command()
def sync(
    sizes: Sizes = "64KiB,1MiB,16MiB",
    compressors: Compressors = "none,fp16,int8,int4,onebit,topk:ratio=0.01",
    only_mpi: Annotated[bool, typer.Option("--only-mpi", help="Measure MPI's own allreduce only.")] = False,
    route: Annotated[
        str | None,
        typer.Option(metavar="ROUTE", help="Route of the compressed methods; default: the session's choice."),
    ] = None,
    repeats: Repeats = 20,
    seconds: Seconds = None,
    json: JsonOut = None,
    trace: TraceOut = None,
) -> None:
    """Time one array with every compressor beside MPI_Allreduce and what link and memory allow; check every result.

    [dim]espresso-mpi lab --hosts 2 --ranks 2 --rate 1gbit -- espresso-mpi bench sync --sizes 16MiB[/dim]
    """
    from espresso_mpi.bench import sync

    sync.main(
        sizes=sizes, compressors=compressors, only_mpi=only_mpi, route=route, repeats=repeats, seconds=seconds,
        json=json, trace=trace,
    )  # fmt: skip


@bench.command()
def routes(
    sizes: Sizes = "1MiB,64MiB",
    compressors: Compressors = "none,fp16,bf16,int8,int4,onebit,topk:ratio=0.01,randomk:ratio=0.01,powersgd",
    repeats: Repeats = 20,
    seconds: Seconds = None,
    json: JsonOut = None,
) -> None:
    """Time one array by every named route, compressor by compressor: what the session's own choice rests on.

    [dim]espresso-mpi lab --hosts 2 --ranks 2 --rate 1gbit -- espresso-mpi bench routes --compressors fp16[/dim]
    """
    from espresso_mpi.bench import routes

    routes.main(sizes=sizes, compressors=compressors, repeats=repeats, seconds=seconds, json=json)


@bench.command()
def tensors(
    compressors: Compressors = "none,fp16,int8,onebit",
    sizes: TensorSizes = None,
    repeats: Repeats = 10,
    seconds: Seconds = None,
    json: JsonOut = None,
) -> None:
    """Time one sync of ResNet-101's 314 gradients beside MPI_Allreduce of one buffer, and of each tensor.

    [dim]espresso-mpi run -n 4 -- espresso-mpi bench tensors[/dim]
    """
    from espresso_mpi.bench import tensors

    tensors.main(compressors=compressors, sizes=sizes, repeats=repeats, seconds=seconds, json=json)


@bench.command()
def overlap(
    compressors: Compressors = "none,int8,onebit",
    sizes: TensorSizes = None,
    compute_ms: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Computing of a step; default: as long as its sync.")
    ] = None,
    repeats: Repeats = 10,
    seconds: Seconds = None,
    json: JsonOut = None,
    trace: TraceOut = None,
) -> None:
    """Time a step that pushes gradients while it computes, beside computing and sync alone. Use a rank a core.

    [dim]espresso-mpi lab --hosts 2 --ranks 1 --rate 1gbit -- espresso-mpi bench overlap[/dim]
    """
    from espresso_mpi.bench import overlap

    overlap.main(
        compressors=compressors, sizes=sizes, compute_ms=compute_ms, repeats=repeats, seconds=seconds, json=json,
        trace=trace,
    )  # fmt: skip


@bench.command()
def growth(
    sizes: Sizes = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB",
    compressors: Compressors = "none,int8,onebit",
    ranks: Annotated[
        str | None, typer.Option(metavar="LIST", help="Numbers of ranks; default: powers of two, and all.")
    ] = None,
    rank_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest size that fewer than all ranks are measured with.")
    ] = "16MiB",
    repeats: Repeats = 15,
    seconds: Seconds = None,
    json: JsonOut = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it to a PNG file.")] = None,
) -> None:
    """Time every size on all ranks and on the first few, and fit alpha + beta * bytes.

    [dim]espresso-mpi run -n 8 -- espresso-mpi bench growth --plot growth.png[/dim]
    """
    from espresso_mpi.bench import growth

    growth.main(
        sizes=sizes, compressors=compressors, ranks=ranks, rank_limit=rank_limit, repeats=repeats, seconds=seconds,
        json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def truth(
    compressors: Compressors = "fp16,int8,onebit,topk:ratio=0.01",
    tensors: Annotated[str, typer.Option(metavar="LIST", help="Models by their tensors: 5, 60.")] = "5,60",
    calls: Annotated[
        str, typer.Option(metavar="LIST", help="How gradients are handed over: sync, push.")
    ] = "sync,push",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Characters that a step predicts.")] = 512,
    seconds: Annotated[float, typer.Option(min=1.0, metavar="S", help="Time for all training steps.")] = 80.0,
    profile_seconds: Annotated[float, typer.Option(min=1.0, metavar="S", help="Time for the profile.")] = 40.0,
    json: JsonOut = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the profile and the traces of the predictions here.")
    ] = None,
) -> None:
    """Compare predicted with measured training steps, of a session that plans for itself and of every baseline.

    [dim]espresso-mpi lab --hosts 2 --ranks 2 --rate 100mbit -- espresso-mpi bench truth[/dim]
    """
    from espresso_mpi.bench import truth

    truth.main(
        compressors=compressors, tensors=tensors, calls=calls, batch=batch, seconds=seconds,
        profile_seconds=profile_seconds, json=json, keep=keep,
    )  # fmt: skip


@bench.command()
def planner(
    quick: Annotated[bool, typer.Option(help="A few cases only.")] = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Parts: selection, gap, cases, paper, growth, orders; default: all."),
    ] = None,
    json: JsonOut = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw selection time against size to a PNG file.")
    ] = None,
) -> None:
    """Time the planner, compare its plans with certified bounds, with full enumeration and with the paper. No MPI.

    [dim]espresso-mpi bench planner --quick[/dim]
    """
    from espresso_mpi.bench import planner

    planner.main(quick=quick, only=only, json=json, plot=plot)


@bench.command()
def compressors(
    sizes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Sizes of the float32 array; default: 16MiB, on a GPU 400000000B."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to measure.")] = "cpu",
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Compressors with their parameters; all; or variants: all, and more of each."
        ),
    ] = "all",
    threads: Annotated[str, typer.Option(metavar="LIST", help="Numbers of CPU threads to measure with.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Timed repetitions of each method.")] = 15,
    json: JsonOut = None,
) -> None:
    """Time encode and decode of every method against the speed of memory; one process, no MPI.

    [dim]espresso-mpi bench compressors --methods int8,onebit --threads 1,2[/dim]
    """
    from espresso_mpi.bench import compressors

    compressors.main(sizes=sizes, device=device, methods=methods, threads=threads, repeats=repeats, json=json)


@bench.command()
def train(
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="Compressors to train with in turn; none is fp32.")
    ] = DEFAULT_COMPRESSORS,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps of each method.")] = 1500,
    hidden: Annotated[int, typer.Option(min=1, metavar="N", help="Width of the model's hidden layer.")] = 256,
    momentum: Annotated[float, typer.Option(metavar="B", help="Momentum of SGD, at the same effective rate.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights, batches and stochastic compressors.")] = 0,
    ablation: Annotated[bool, typer.Option(help="Also train methods that lose much without error feedback.")] = True,
    target_loss: Annotated[
        float | None, typer.Option(metavar="BITS", help="Loss to reach; default: fp32's at the end plus 2 %.")
    ] = None,
    route: Annotated[str | None, typer.Option(metavar="ROUTE", help="Route of the compressed methods.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="auto|FILE", help="Also train by a plan: a file's, or one that the session makes."),
    ] = None,
    json: JsonOut = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss against seconds and bytes to a PNG file.")
    ] = None,
    trace: TraceOut = None,
) -> None:
    """Train a small language model with each method in turn: loss, time, bytes.

    [dim]espresso-mpi lab --hosts 2 --ranks 2 --rate 100mbit -- espresso-mpi bench train[/dim]
    """
    from espresso_mpi.bench import train

    train.main(
        methods=methods, steps=steps, hidden=hidden, momentum=momentum, seed=seed, ablation=ablation,
        target_loss=target_loss, route=route, plan=plan, json=json, plot=plot, trace=trace,
    )  # fmt: skip


@bench.command()
def optimizers(
    methods: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Compressors to train with in turn; default: nine, fp32 first."),
    ] = None,
    without_feedback: Annotated[
        str, typer.Option(metavar="LIST", help="Those to train with once more, without error feedback.")
    ] = "onebit",
    optimizer: Annotated[str, typer.Option(metavar="LIST", help="adamw, sgd (momentum 0.9), or both.")] = "adamw,sgd",
    lr: Annotated[
        str | None, typer.Option(metavar="LIST", help="Peak learning rates; default: one for each optimizer.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Seeds of weights, batches and compressors.")] = "0",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps of each run.")] = 200,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Written after every run; runs that it holds are not repeated."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw loss against steps to a PNG file.")] = None,
) -> None:
    """Train a GPT of 3 million parameters with each method under AdamW and momentum SGD: loss. Needs torch.

    [dim]espresso-mpi run -n 2 -- espresso-mpi bench optimizers --json optimizers.json[/dim]
    """
    from espresso_mpi.bench import optimizers

    optimizers.main(
        methods=methods or optimizers.METHODS, without_feedback=without_feedback, optimizer=optimizer, lr=lr,
        seeds=seeds, steps=steps, json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def report(
    results: Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON results of the benchmarks.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The report to write.")] = Path("BENCHMARKS.md"),
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot of bench train to show.")] = None,
) -> None:
    """Write a report from the JSON results of benchmarks."""
    from espresso_mpi.bench import report

    report.main(results=results, output=output, picture=picture)


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
