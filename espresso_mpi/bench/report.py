"""``bench report``: BENCHMARKS.md from the JSON results of benchmarks, with node, versions and date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import GenericAlias
from typing import Any

from msgspec import Struct

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema

from ..files.output import RESULT_BYTES
from . import defaults, kept_sections, sync_tables, validate_tables
from .gpu import report as gpu_report
from .harness.columns import size_text
from .harness.rows import R, completed
from .planner import rows as planner_rows
from .planner import tables as planner_tables
from .wrapping import wrapped

Result = Mapping[str, Any]

_HEAD = """# Benchmarks

Written by `make bench`. Ratios within one run are what counts: the methods take turns in every repetition, so that a
noisy moment of the node meets all of them. Absolute times are this node's.
"""

_SYNC = """
## What the columns mean

One float32 array of each size, on every rank. *median* and *p99* are over repetitions, of the slowest rank of each.
*x fp32* and *x MPI fp16* are the time of the quickest `MPI_Allreduce` on the same array, as it is and cast to float16,
divided by the method's; *x our fp16* that of our `fp16`: below 1 the method loses. MPI's rows: the library's own choice
of algorithm, in place; `-tuned`, the quickest of all others (Open MPI's six algorithms of the component `tuned`, each
in place and with two buffers, and its own choice with two buffers), found by trials before and named under *route*. In
float16 casts and sum are compiled; MPI's own half type is slower. Rows with another library's name are from a run of
their own, minutes apart: compare them less closely.

*algbw* and *busbw* are as in NVIDIA's nccl-tests: the bytes of the float32 array over the median time, and that times
2(p-1)/p for p ranks, the share of the array that each rank of an allreduce must send. Compression raises both.

*wire* is the least time on the busiest link: the bytes that a node sends to others over the best rate that a plain
stream between nodes reached in the same run. *memory* is the least time for what the ranks of a node must read
and write along the route (the formulas stand in `espresso_mpi/bench/bound.py`), at the rate of plain copies or sums,
whichever moved more, by all ranks at once in the same run. The larger one is the *bound*: no implementation of that
route, on that node, is quicker, but for what caches and the start of a link serve. For MPI, which does not tell its
algorithm, it is that of the allreduce with the least bytes, flat or by levels, casts included. *time / bound* is how
far above it a method is.

*between nodes* is what all ranks together send over links in one synchronisation. *wrong* counts elements that
differ from the reference: the float64 mean for dense, the sum of decoded payloads bit for bit for compressed methods.
On the emulated cluster all nodes share one memory, and a link that has paused lets the first 2 ms of data (250 kB at
1 Gbit) pass at full speed, so sizes below that show latency only, and can be below the bound.
"""

_TENSORS = """
All gradients of a network at once, in the order of a backward pass. *fused* is `MPI_Allreduce` of one buffer as large
as all of them, without the copies into and out of it; *each* is one `MPI_Allreduce` a tensor. *time / fused* above 1
loses to the one buffer, *x each* above 1 beats one call per tensor. *wrong* as above.
"""

_TORCH = """
One step of training: forward, backward, synchronisation, AdamW; all ways take turns. *gloo* is DDP over gloo, *ddp* is
DDP over the process group of this library with its hook, *push* is `GradientSync`, and *sync* the same without overlap.
*exposed* is the time beyond a step that computes alone. */ gloo* is over the step of DDP over gloo with torch's hook of
the same kind, or without a hook where torch has none.
"""

_OVERLAP = """
A step in which the main thread multiplies matrices and pushes each gradient when its share of that is done. *T_c* is
the computing alone, for each method so many products that it is about *T_s*; one computing, in turns with all methods,
says how long a product takes. *T_s* is one sync of everything alone, *largest* a sync of the largest tensor alone, in
turns with the step. *allowed* is 1.15 · max(T_c, T_s) + largest. *hidden* is the share of the shorter of T_c and T_s
that disappeared behind the other; below 0 pushing takes longer than computing and one sync one after the other. With
one rank a core, encoding, sums and the kernel's network stack take the core that computes, so only waiting for the wire
can be hidden. *wrong* counts elements in which pushing differs from one sync.
"""

_SCALING = """
t = α + β · bytes, fitted by least squares of relative errors; *deviation* is their root mean square. α is what a call
costs, 1/β the rate (of float32 input) that large arrays approach. *algbw* and *busbw* are those of the largest size.
*wrong* counts elements of arrays of at most 16 MiB; nothing stands there if the run did not count them.
"""

_COLLECTIVES = """
Every collective as a call, beside MPI's own blocking call on the same buffers, in turns. *size* is that of the largest
array of a rank. *median* and *p99* are over repetitions, of the slowest rank of each; *MPI* is its median, and *best /
best* compares the least times. *algbw* is the size over the median, *busbw* that times 2(p-1)/p for an allreduce over p
ranks, 1 for reduce and broadcast, (p-1)/p for all others. *wrong* counts elements that differ from the exact result,
over all ranks. *sent* is what all ranks together send in a compressed allreduce, *beyond expected* what that is more
than the sizes of the payloads along the route.
"""

_LOSSES = """
## Where compression loses

What took longer than the quickest way to average the same array in the same run. *Against fp32*: `MPI_Allreduce` of
float32 by the quickest of its algorithms, or our `none`, which is listed itself where MPI's was quicker. *Against
fp16*: `MPI_Allreduce` of float16, casts included, or our `fp16`, likewise; that is the fair baseline for everything
that loses more than a cast does. Another library is the quicker of its float32 and float16.

"""

_COMPRESSORS = """
`make bench-compressors`. GB/s are of float32 input, in the median and in the *best* repetition. *of bound*: the least
time that the method's memory traffic could take, at the best rate of the plain kernels in the first rows, divided by
the best time it took. *read*, *update* and *accumulate* move 4, 8 and 12 bytes per element; *copy* counts 8, but lines
that are written without having been read are read first, so it is below the others. Caches are emptied before each
call of the large arrays, which are four times the last-level cache. The small ones are timed after four calls in a row,
as where a gradient has just been computed; memory does not bound them. Encode includes the residual, eight of the
twelve bytes per element that it reads and writes, except in the rows that say so: those methods refuse error feedback.
*vNMSE* is ‖x − C(x)‖²/‖x‖² on normal values, *expected* what analysis says of it. *call* is the time to encode one
element.
"""

_TRAIN = """
A character language model on the English text in Python's `pydoc_data.topics`, plain SGD, the same weights, batches and
learning rate for all methods. Under momentum and AdamW some lose far more ([docs/compressors.md](docs/compressors.md)).
*loss* is bits per character on held-out text. *s to target*: training time until fp32's final loss + 2 %. A step's time
is split into compute (the slowest rank's) and sync. Validation is outside the clock.
"""

_GPU = """
`espresso-mpi gpu-check`: what the GPU support promises, tried on one GPU ([docs/gpu.md](docs/gpu.md)). *of bound*: the
time of the least bytes that a method must read and write, at the rate of a copy, over the method's time.
"""

_OPTIMIZERS = """
`make bench-optimizers`. A GPT is trained with PyTorch on the text in `pydoc_data.topics`, by every method with the same
weights, batches and learning rates: AdamW as PyTorch has it (betas 0.9 and 0.999, weight decay 0.01), and SGD with
momentum 0.9 or, where the method has a momentum of its own (`dgc`), without. The peak learning rate *lr* follows a
warm-up and a cosine; it was chosen with fp32 and not again for each method. *loss* is bits per character on held-out
text, *spread* the largest less the smallest over the seeds. *vs fp32* compares runs of the same optimizer, learning
rate and seed: the mean, and the range *over seeds*. The runs are short, and of one model: take orders from them, not
digits. Runs that differ in rounding alone come to differ by as much as fp16 and int8 do here, so less says nothing.
"""

_ACCURACY = """
`espresso-mpi bench accuracy` ([docs/time-to-accuracy.md](docs/time-to-accuracy.md)). A network is trained with
PyTorch by all ways from the same weights, on the same batches and with the same learning rates. *loss* is that of
validation at the end, the mean over the seeds, and *spread* the largest less the smallest. The target is the loss of
fp32 + 0.5 %. *s to target* and *to target* are the training clock, without validation, and what a rank has sent, at the
first validation at which the mean of the seeds was there.
"""

_PLANNER = """
`espresso-mpi bench planner`, without MPI: models and clusters are descriptions ([docs/planner.md](docs/planner.md)).
Steps are simulated, in the order `schedule` unless a table says otherwise; times of deciding are measured here.
"""

_VALIDATE = """
Training steps as the planner predicts them and as they were measured. Predictions are made from a profile of this
cluster and from the workload of the training, both recorded before, in other sessions; then all methods of a case
train in turns. *calls*: gradients are synchronised at the end of the backward pass (`sync`) or pushed as they come
(`push`).
*error* is of the prediction; *bias*: the median of the errors with their signs. *computing*: how long it took until all
gradients were there, over the recorded time: with `sync` it shows how far the node's speed changed in between.
*time / best*: over the quickest method measured; *auto / best*: that of what `plan="auto"` chose.
"""


def main(*, results: Sequence[Path], output: Path, picture: Path | None = None, keep: bool = False) -> None:
    """Write ``output`` from the results of the benchmarks, in the order given; then where compression loses.

    Args:
        picture: the plot of ``bench train``, as the report is to link it.
        keep: sections of ``output`` stay if ``results`` has none with their title.

    Raises:
        ConfigError: a file is missing or is no such result.
    """
    loaded = _merged([_load(path) for path in results])
    sections = [_made_of(result, partial(_section, result, picture)) for result in loaded]
    text = _HEAD + _losses(loaded) + _SYNC + "".join(sections)
    if keep and output.exists():
        text = kept_sections.joined(output.read_text(), text)
    output.write_text(wrapped(text))
    print(f"wrote {output}")


class _Content(Struct):
    """What every result has; the rest goes by the kind."""

    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    kind: str | None = None


def _load(path: Path) -> Result:
    def read(content: Any) -> Result:
        schema.convert(content, _Content, "not the result of a benchmark, as bench ... --json makes it")
        return {**content, "path": path, "kind": _kind(content)}

    return schema.load(path, read, RESULT_BYTES)


def _merged(results: Sequence[Result]) -> list[Result]:
    """MPI's rows of another library than ours ran on, which are runs of their own, in the table of the same place."""
    found: list[Result] = []
    for result in results:
        only_mpi = result["kind"] == "sync" and all(row["method"].startswith(sync_tables.MPI) for row in result["rows"])
        beside = [i for i, one in enumerate(found) if one["kind"] == "sync" and _where(one) == _where(result)]
        if only_mpi and beside:
            library = _library(result)
            rows = [{**row, "method": f"{row['method']} ({library})"} for row in result["rows"]]
            own = found[beside[0]]
            found[beside[0]] = {**own, "rows": _by_size([*own["rows"], *rows])}
        else:
            found.append(result)
    return found


def _by_size(rows: Sequence[Result]) -> list[Result]:
    return sorted(rows, key=lambda row: row["nbytes"])


def _kind(result: Result) -> str:
    """Which benchmark made a result."""
    if "kind" in result:
        return str(result["kind"])
    if any("encode_bound_fraction" in row for row in result["rows"]):
        return "compressors"
    return "train" if "curves" in result else "sync"


def _section(result: Result, picture: Path | None) -> str:
    titles = {
        "compressors": ("Compressors", _COMPRESSORS),
        "train": (f"Training: {_where(result)}", _TRAIN),
        "sync": (f"Synchronisation: {_where(result)}", ""),
        "tensors": (f"The gradients of {result.get('network')}: {_where(result)}", _TENSORS),
        "overlap": (f"Overlap with computing: {_where(result)}", _OVERLAP),
        "collectives": (f"Collectives: {_where(result)}", _COLLECTIVES),
        "gpu": (f"GPU: {gpu_report.cards_of(result)}" if result["kind"] == "gpu" else "", _GPU),
        "torch": (f"Training steps in PyTorch: {_where(result)}", _TORCH),
        "scaling": (f"How cost grows: {_where(result)}", _SCALING),
        "optimizers": (f"What the optimizer makes of it: {_where(result)}", _OPTIMIZERS),
        "accuracy": (f"Time to accuracy: {_where(result)}", _ACCURACY),
        "planner": ("The planner", _PLANNER),
        "validate": (f"Predicted and measured steps: {_where(result)}", _VALIDATE),
    }
    if result["kind"] not in titles:
        known = ", ".join(titles)
        raise ConfigError(f"no section for results of kind {result['kind']!r}; expected {known}")
    title, text = titles[result["kind"]]
    return f"\n## {title}\n{text}\n{_environment(result)}\n{_body(result, picture)}"


def _made_of(result: Result, make: Callable[[], str]) -> str:
    """A text about a result; where a field is damaged, an error that names the file.

    Raises:
        ConfigError: naming the file, where something in it is not as the benchmark writes it.
    """
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{result['path']}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{result['path']}: something in this result is missing or damaged ({type(error).__name__}: {error}); make "
            f"it anew with bench ... --json"
        ) from None


def _body(result: Result, picture: Path | None) -> str:
    """The tables of a result, and what belongs to them."""
    if result["kind"] == "train":
        return _train(result) + _picture("Loss against seconds and against bytes", picture)
    return _BODIES[result["kind"]](result)


def _picture(title: str, path: Path | str | None) -> str:
    return f"\n![{title}]({path})\n" if path else ""


def _timings(result: Result, kind: type[R]) -> list[R]:
    """The rows of a collective, with their bandwidths if it is known how many ranks there were."""
    job = result["environment"].get("job") or {}
    rows: Any = GenericAlias(list, (kind,))
    return completed(schema.convert(result["rows"], rows, "rows"), job.get("ranks"))


# --- where compression loses ------------------------------------------------------------------------------------------


def _loss(result: Result) -> str:
    told = sync_tables.losses(_timings(result, sync_tables.Row))
    return "\n".join(f"- {_where(result)}, against {name}: {text}." for name, text in told.items())


def _losses(results: Sequence[Result]) -> str:
    """What the rows say against compression, and against us; nothing where no synchronisation was measured."""
    texts = [_made_of(result, partial(_loss, result)) for result in results if result["kind"] == "sync"]
    if not texts:
        return ""
    return _LOSSES + "\n".join(filter(None, texts)) + "\n"


# --- parts ------------------------------------------------------------------------------------------------------------


def _where(result: Result) -> str:
    environment = result["environment"]
    lab = environment.get("lab")
    job = environment.get("job") or {}
    return f"emulated cluster, {lab}" if lab else f"{job.get('ranks', '?')} ranks on one node"


def _library(result: Result) -> str:
    """The MPI library that a result was measured with, and its version."""
    mpi = result["environment"]["mpi"] or {}
    return " ".join(str(part) for part in (mpi.get("library"), mpi.get("version")) if part)


def _environment(result: Result) -> str:
    e = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version)
    mpi = _library(result)
    memory = f"{e['memory_bytes'] / 2**30:.0f} GiB"
    node = f"{e['cpu']}, {e['cores']} cores, {memory}; {e['system']}"
    mpi = f"{mpi}; " if mpi else ""
    return f"{e['date']}; {node}; {mpi}Python {e['python']}, {versions}.\n"


def _sync(result: Result) -> str:
    rates = result.get("yardsticks", {})
    reached = [f"{size_text(int(nbytes))}: {sync_tables.rates_text(rate)}" for nbytes, rate in rates.items()]
    table = sync_tables.TABLE.markdown(_timings(result, sync_tables.Row))
    return table + (f"\nMeasured beside it: {'; '.join(reached)}.\n" if reached else "")


def _tensors(result: Result) -> str:
    from . import tensors

    return tensors.TABLE.markdown(_timings(result, tensors.Row))


def _torch(result: Result) -> str:
    from . import torch_steps

    rows = schema.convert(result["rows"], list[torch_steps.Row], "rows")
    return f"{result['network']}.\n\n{torch_steps.TABLE.markdown(rows)}"


def _overlap(result: Result) -> str:
    from . import overlap

    return overlap.TABLE.markdown(schema.convert(result["rows"], list[overlap.Row], "rows"))


def _gpu(result: Result) -> str:
    return gpu_report.tables(result)


def _scaling(result: Result) -> str:
    from . import scaling

    table = scaling.TABLE.markdown(scaling.curves(_timings(result, scaling.Row)))
    return table + _picture("Time against size and against ranks", result.get("picture"))


def _collectives(result: Result) -> str:
    from . import collective_tables

    rows = schema.convert(result["rows"], list[collective_tables.Row], "rows")
    kinds = ", ".join(dict.fromkeys(f"{row.dtype} {row.op}".strip() for row in rows if row.op))
    note = f"Reductions: {kinds}.\n\n" if kinds else ""
    table = collective_tables.TABLE.markdown(rows)
    return note + table + _picture("Time against size, by collective", result.get("picture"))


def _train(result: Result) -> str:
    from . import train_tables

    corpus = result["corpus"]
    note = f"\nText: {corpus['characters']} characters, SHA-256 `{corpus['sha256']}`. Bytes are per rank and step.\n"
    return train_tables.TABLE.markdown(schema.convert(result["rows"], list[train_tables.Row], "rows")) + note


def _compressors(result: Result) -> str:
    """A table for every size: caches make one of another kind of the others."""
    from . import compressor_tables

    rows = schema.convert(result["rows"], list[compressor_tables.Row], "rows")
    tables = compressor_tables.by_size(rows, result["cache"])
    text = "".join(f"\n### {title}\n\n{compressor_tables.TABLE.markdown(own)}" for title, own in tables.items())
    note = compressor_tables.above(rows)
    return text + (f"\n{note}\n" if note else "")


def _optimizers(result: Result) -> str:
    """The table of all runs, and what they were made with."""
    from . import optimizer_tables

    settings = result["settings"]
    shape = settings["shape"]
    groups = optimizer_tables.groups(optimizer_tables.rows_of(result["rows"]))
    note = (
        f"{settings['parameters']:,} parameters: {shape['layers']} layers of width {shape['width']}, "
        f"{shape['context']} characters of context; {settings['ranks']} ranks x {settings['batch']} sequences, "
        f"{settings['steps']} steps. Text: {settings['text_characters']} characters, SHA-256 "
        f"`{settings['text_sha256']}`. *KiB per step* are what a rank sends."
    )
    return f"{optimizer_tables.TABLE.markdown(groups)}\n{note}\n"


def _accuracy(result: Result) -> str:
    from . import accuracy_tables

    return accuracy_tables.markdown(result, defaults.Accuracy.tolerance)


def _planner(result: Result) -> str:
    """A table for every part that was measured."""
    rows = planner_rows.read(result["rows"])
    sections = []
    for part, own in planner_tables.parts(rows):
        notes = "".join(f"\n{note}\n" for note in part.notes(own))
        sections.append(f"\n### {part.title}\n{part.text}\n{part.table.markdown(own)}{notes}")
    return "".join(sections) + _picture("Selection time against tensors and options", result.get("picture"))


def _validate(result: Result) -> str:
    """What it comes to in every case, and all methods."""
    rows = schema.convert(result["rows"], list[validate_tables.Row], "rows")
    return f"{validate_tables.CASES.markdown(validate_tables.cases(rows))}\n{validate_tables.TABLE.markdown(rows)}"


_BODIES: dict[str, Callable[[Result], str]] = {
    "sync": _sync,
    "tensors": _tensors,
    "overlap": _overlap,
    "scaling": _scaling,
    "collectives": _collectives,
    "gpu": _gpu,
    "torch": _torch,
    "compressors": _compressors,
    "optimizers": _optimizers,
    "accuracy": _accuracy,
    "planner": _planner,
    "validate": _validate,
}
