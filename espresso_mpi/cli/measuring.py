"""The commands ``bench ...``."""

from pathlib import Path
from typing import Annotated

import typer

from ..bench import defaults
from .arguments import (
    Compressors,
    JsonKept,
    JsonOut,
    Repeats,
    Route,
    Seconds,
    Sizes,
    Steps,
    TensorSizes,
    TraceOut,
    Trained,
    comma_list,
    input_file,
    number,
    png,
    time_limit,
)
from .program import bench


@bench.command()
def sync(
    sizes: Sizes = defaults.Sync.sizes,
    compressors: Compressors = defaults.Sync.compressors,
    only_mpi: Annotated[bool, typer.Option("--only-mpi", help="Measure MPI's own allreduce only.")] = False,
    route: Route = None,
    repeats: Repeats = defaults.Sync.repeats,
    seconds: Seconds = None,
    json: JsonOut = None,
    trace: TraceOut = None,
) -> None:
    """Time one array with every compressor, MPI_Allreduce, and the bounds of link and memory; check every result.

    [dim]espresso-mpi lab --nodes 2 --ranks 2 --rate 1gbit -- espresso-mpi bench sync --sizes 16MiB[/dim]
    """
    from espresso_mpi.bench import sync

    sync.main(
        sizes=sizes, compressors=compressors, only_mpi=only_mpi, route=route, repeats=repeats, seconds=seconds,
        json=json, trace=trace,
    )  # fmt: skip


@bench.command()
def collectives(
    collectives: Annotated[
        str, comma_list("allreduce, reduce, broadcast, …, alltoallv, barrier; or all.")
    ] = defaults.Collectives.collectives,
    sizes: Annotated[
        str, typer.Option(metavar="FROM-TO|LIST", help="Sizes of the largest array of a rank: a range, or some.")
    ] = defaults.Collectives.sizes,
    factor: Annotated[int, number("From one size of a range to the next.", least=2)] = defaults.Collectives.factor,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Element type, as numpy names it: float32, int64, complex64, bool, …")
    ] = defaults.Collectives.dtype,
    op: Annotated[
        str, typer.Option(metavar="OP", help="Operator of reductions: sum, mean, prod, min, max, land, …, bxor.")
    ] = defaults.Collectives.op,
    compressors: Annotated[
        str | None,
        comma_list("Also allreduce with these; default: some, for sums and means of float32."),
    ] = None,
    out_of_place: Annotated[bool, typer.Option("--out-of-place", help="Reductions write to a second array.")] = False,
    repeats: Repeats = defaults.Collectives.repeats,
    seconds: Seconds = defaults.Collectives.seconds,
    json: JsonOut = None,
    plot: Annotated[Path | None, png("time against size")] = None,
) -> None:
    """Time every collective beside MPI's own on the same buffers, and allreduces that compress; check every result.

    [dim]espresso-mpi run -n 4 -- espresso-mpi bench collectives --sizes 1MiB-64MiB[/dim]
    """
    from espresso_mpi.bench import collectives as suite

    suite.main(
        collectives=collectives, sizes=sizes, factor=factor, dtype=dtype, op=op, compressors=compressors,
        out_of_place=out_of_place, repeats=repeats, seconds=seconds, json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def routes(
    sizes: Sizes = defaults.Routes.sizes,
    compressors: Compressors = defaults.Routes.compressors,
    repeats: Repeats = defaults.Routes.repeats,
    seconds: Seconds = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="normal: the same values in each call; gradients: those of a GPT in training, and the error of their "
            "sum (needs PyTorch).",
        ),
    ] = defaults.Routes.data,
    json: JsonOut = None,
) -> None:
    """Time one array by every named route, compressor by compressor; the session's choice of routes follows from it.

    [dim]espresso-mpi lab --nodes 2 --ranks 2 --rate 1gbit -- espresso-mpi bench routes --compressors fp16[/dim]
    """
    from espresso_mpi.bench import routes

    routes.main(sizes=sizes, compressors=compressors, repeats=repeats, seconds=seconds, data=data, json=json)


@bench.command()
def tensors(
    compressors: Compressors = defaults.Tensors.compressors,
    sizes: TensorSizes = None,
    repeats: Repeats = defaults.Tensors.repeats,
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
    compressors: Compressors = defaults.Overlap.compressors,
    sizes: TensorSizes = None,
    compute_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="MS", help="Milliseconds of computing in a step; default: as long as its sync."),
    ] = None,
    repeats: Repeats = defaults.Overlap.repeats,
    seconds: Seconds = None,
    sockets: Annotated[
        bool,
        typer.Option("--sockets", help="Also move the bytes of a dense sum through plain sockets, for comparison."),
    ] = False,
    json: JsonOut = None,
    trace: TraceOut = None,
) -> None:
    """Time a step that pushes gradients while it computes, and computing and sync alone. Use one rank per core.

    [dim]espresso-mpi lab --nodes 2 --ranks 1 --rate 1gbit -- espresso-mpi bench overlap[/dim]
    """
    from espresso_mpi.bench import overlap

    overlap.main(
        compressors=compressors, sizes=sizes, compute_ms=compute_ms, repeats=repeats, seconds=seconds, sockets=sockets,
        json=json, trace=trace,
    )  # fmt: skip


@bench.command(name="torch")
def torch_steps(
    methods: Annotated[
        str, comma_list("Ways and methods: alone, gloo:fp16, ddp:int8, push:int8, sync:auto, …")
    ] = defaults.Torch.methods,
    batch: Annotated[int, number("Sequences of a rank and step.")] = defaults.Torch.batch,
    width: Annotated[int, number("Width of the GPT.", least=4)] = defaults.Torch.width,
    layers: Annotated[int, number("Layers of the GPT.")] = defaults.Torch.layers,
    repeats: Repeats = defaults.Torch.repeats,
    seconds: Seconds = None,
    json: JsonOut = None,
) -> None:
    """Time training steps in PyTorch: DDP over gloo with torch's hooks, and this library's ways. Needs PyTorch.

    [dim]espresso-mpi lab --nodes 2 --ranks 1 --rate 100mbit -- python -m espresso_mpi bench torch[/dim]
    """
    from espresso_mpi.bench import torch_steps

    torch_steps.main(
        methods=methods, batch=batch, width=width, layers=layers, repeats=repeats, seconds=seconds, json=json
    )


@bench.command()
def scaling(
    sizes: Sizes = defaults.Scaling.sizes,
    compressors: Compressors = defaults.Scaling.compressors,
    ranks: Annotated[str | None, comma_list("Numbers of ranks; default: powers of two, and all.")] = None,
    rank_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest size that fewer than all ranks are measured with.")
    ] = defaults.Scaling.rank_limit,
    repeats: Repeats = defaults.Scaling.repeats,
    seconds: Seconds = None,
    json: JsonOut = None,
    plot: Annotated[Path | None, png("time against size and ranks")] = None,
) -> None:
    """Time every size on all ranks and on the first few, and fit alpha + beta * bytes.

    [dim]espresso-mpi run -n 8 -- espresso-mpi bench scaling --plot scaling.png[/dim]
    """
    from espresso_mpi.bench import scaling

    scaling.main(
        sizes=sizes, compressors=compressors, ranks=ranks, rank_limit=rank_limit, repeats=repeats, seconds=seconds,
        json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def validate(
    compressors: Compressors = defaults.Validate.compressors,
    tensors: Annotated[str, comma_list("Models by their tensors: 5, 60.")] = defaults.Validate.tensors,
    calls: Annotated[
        str,
        comma_list("How gradients are synchronised: sync (all at the end), push (each as it is ready)."),
    ] = defaults.Validate.calls,
    batch: Annotated[int, number("Characters that a step predicts.")] = defaults.Validate.batch,
    seconds: Annotated[float, time_limit("Time for all training steps.")] = defaults.Validate.seconds,
    profile_seconds: Annotated[float, time_limit("Time for the profile.")] = defaults.Validate.profile_seconds,
    json: JsonOut = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the profile and the workloads that predictions are made from."),
    ] = None,
) -> None:
    """Compare predicted with measured training steps, of a session that plans for itself and of every baseline.

    [dim]espresso-mpi lab --nodes 2 --ranks 2 --rate 100mbit -- espresso-mpi bench validate[/dim]
    """
    from espresso_mpi.bench import validate

    validate.main(
        compressors=compressors, tensors=tensors, calls=calls, batch=batch, seconds=seconds,
        profile_seconds=profile_seconds, json=json, keep=keep,
    )  # fmt: skip


@bench.command()
def planner(
    quick: Annotated[bool, typer.Option(help="A few cases only.")] = False,
    only: Annotated[
        str | None,
        comma_list("Parts: selection, gap, cases, paper, distance, scaling, orders; default: all."),
    ] = None,
    json: JsonOut = None,
    plot: Annotated[Path | None, png("selection time against size")] = None,
) -> None:
    """Time the planner, compare its plans with certified bounds, with full enumeration and with the paper. No MPI.

    [dim]espresso-mpi bench planner --quick[/dim]
    """
    from espresso_mpi.bench.planner import suite as planner_suite

    planner_suite.main(quick=quick, only=only, json=json, plot=plot)


@bench.command()
def compressors(
    sizes: Annotated[
        str | None,
        comma_list("Sizes of the float32 array; default: by the last cache, on a GPU 400000000B."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to measure.")] = defaults.Compressors.device,
    methods: Annotated[
        str,
        comma_list("Compressors with their parameters; or all; or variants: all with several parameters each."),
    ] = defaults.Compressors.methods,
    threads: Annotated[str, comma_list("Numbers of CPU threads to measure with.")] = defaults.Compressors.threads,
    repeats: Annotated[int, number("Timed repetitions of each method.")] = defaults.Compressors.repeats,
    json: JsonOut = None,
) -> None:
    """Time encode and decode of every method against the speed of memory; one process, no MPI.

    [dim]espresso-mpi bench compressors --methods int8,onebit --threads 1,2[/dim]
    """
    from espresso_mpi.bench import compressors

    compressors.main(sizes=sizes, device=device, methods=methods, threads=threads, repeats=repeats, json=json)


@bench.command()
def train(
    methods: Trained = defaults.Train.methods,
    steps: Steps = defaults.Train.steps,
    hidden: Annotated[int, number("Width of the model's hidden layer.")] = defaults.Train.hidden,
    momentum: Annotated[
        float, typer.Option(metavar="B", help="Momentum of SGD, at the same effective rate.")
    ] = defaults.Train.momentum,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of weights, batches and stochastic compressors.")
    ] = defaults.Train.seed,
    ablation: Annotated[
        bool, typer.Option(help="Also train methods that lose much without error feedback.")
    ] = defaults.Train.ablation,
    target_loss: Annotated[
        float | None, typer.Option(metavar="BITS", help="Loss to reach; default: fp32's at the end plus 2 %.")
    ] = None,
    route: Route = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="auto|FILE", help="Also train by a plan: a file's, or one that the session makes."),
    ] = None,
    json: JsonOut = None,
    plot: Annotated[Path | None, png("loss against seconds and bytes")] = None,
    trace: TraceOut = None,
) -> None:
    """Train a small language model with each method in turn: loss, time, bytes.

    [dim]espresso-mpi lab --nodes 2 --ranks 2 --rate 100mbit -- espresso-mpi bench train[/dim]
    """
    from espresso_mpi.bench import train

    train.main(
        methods=methods, steps=steps, hidden=hidden, momentum=momentum, seed=seed, ablation=ablation,
        target_loss=target_loss, route=route, plan=plan, json=json, plot=plot, trace=trace,
    )  # fmt: skip


@bench.command()
def optimizers(
    methods: Trained = defaults.Optimizers.methods,
    without_feedback: Annotated[
        str, comma_list("Compressors to train with again, without error feedback.")
    ] = defaults.Optimizers.without_feedback,
    optimizer: Annotated[
        str,
        comma_list(
            "Of adamw, sgd, muon, onebit-adam, onebit-lamb, zero-one-adam, momentum-sgd, diloco, muloco, sparseloco, "
            "demo."
        ),
    ] = defaults.Optimizers.optimizer,
    lr: Annotated[str | None, comma_list("Peak learning rates; default: one for each optimizer.")] = None,
    seeds: Annotated[str, comma_list("Seeds of weights, batches and compressors.")] = defaults.Optimizers.seeds,
    steps: Steps = defaults.Optimizers.steps,
    json: JsonKept = None,
    plot: Annotated[Path | None, png("loss against steps")] = None,
) -> None:
    """Train a GPT of 3 million parameters with each method under AdamW and momentum SGD: loss. Needs torch.

    [dim]espresso-mpi run -n 2 -- espresso-mpi bench optimizers --json optimizers.json[/dim]
    """
    from espresso_mpi.bench import optimizers

    optimizers.main(
        methods=methods, without_feedback=without_feedback, optimizer=optimizer, lr=lr,
        seeds=seeds, steps=steps, json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def fidelity(
    compressors: Compressors = defaults.Fidelity.compressors,
    seeds: Annotated[str, comma_list("Of weights and batches.")] = defaults.Fidelity.seeds,
    steps: Annotated[int, number("Of each training run.", least=8)] = defaults.Fidelity.steps,
    json: JsonOut = None,
) -> None:
    """Compare what plan="auto" measures of the first gradients with the losses at the end. One process; needs torch."""
    from espresso_mpi.bench import fidelity

    fidelity.main(compressors=compressors, seeds=seeds, steps=steps, json=json)


@bench.command()
def accuracy(
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"gpt, lstm (text, AdamW) or resnet (images, SGD); default: {defaults.Accuracy.workload}.",
        ),
    ] = None,
    ways: Annotated[
        str | None,
        comma_list("gloo:fp16, gradsync:int8, gradsync:auto, onebit-adam, diloco, …; default: most."),
    ] = None,
    seeds: Annotated[
        str | None, comma_list(f"Seeds of weights, batches and compressors; default: {defaults.Accuracy.seeds}.")
    ] = None,
    steps: Annotated[int | None, number(f"Training steps of each run; default: {defaults.Accuracy.steps}.")] = None,
    eval_every: Annotated[int | None, number("Steps between validations; default: a twentieth of all.")] = None,
    batch: Annotated[int | None, number("Examples of a rank and step.")] = None,
    width: Annotated[int | None, number("Width of the network.", least=4)] = None,
    layers: Annotated[int | None, number("Layers of the network.")] = None,
    dense_steps: Annotated[
        int | None, number("First steps, in which optimizers synchronise gradients; default: a fifth.")
    ] = None,
    every: Annotated[
        int | None, number("Local steps between two averages of diloco and its kind; default: 15.")
    ] = None,
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="Peak learning rate of all ways.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="%", help="By how much the target is above the final loss of fp32.")
    ] = defaults.Accuracy.tolerance,
    curves: Annotated[
        Path | None, input_file("Take the runs of this file; measure here only what their steps take.")
    ] = None,
    repeats: Annotated[int, number("Steps of each way that are timed with --curves.")] = defaults.Accuracy.repeats,
    times: Annotated[Path | None, input_file("With --curves: take the step times from this file as well.")] = None,
    json: JsonKept = None,
    plot: Annotated[Path | None, png("loss against seconds")] = None,
) -> None:
    """Train by each way until the loss of fp32: seconds and megabytes that it takes. Needs torch.

    [dim]espresso-mpi lab --nodes 2 --ranks 1 --rate 100mbit -- python -m mpi4py -m espresso_mpi bench accuracy[/dim]
    """
    from espresso_mpi.bench import accuracy

    accuracy.main(
        workload=workload, ways=ways, seeds=seeds, steps=steps, eval_every=eval_every, batch=batch, width=width,
        layers=layers, dense_steps=dense_steps, every=every, lr=lr, tolerance=tolerance, curves=curves,
        repeats=repeats, times=times, json=json, plot=plot,
    )  # fmt: skip


@bench.command()
def report(
    results: Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON results of the benchmarks.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The report to write.")] = Path("BENCHMARKS.md"),
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot of bench train to show.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sections that were not measured anew.")] = False,
) -> None:
    """Write a report from the JSON results of benchmarks; of several runs of one, the rows with the median times."""
    from espresso_mpi.bench import report

    report.main(results=results, output=output, picture=picture, keep=keep)
