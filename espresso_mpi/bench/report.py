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
from . import defaults, kept_sections, medians, report_texts, sync_tables, validate_tables
from .gpu import report as gpu_report
from .harness.columns import size_text
from .harness.rows import R, completed
from .planner import rows as planner_rows
from .planner import tables as planner_tables
from .wrapping import wrapped

Result = Mapping[str, Any]


def main(*, results: Sequence[Path], output: Path, picture: Path | None = None, keep: bool = False) -> None:
    """Write ``output`` from the results of the benchmarks, in the order given; then where compression loses.

    Args:
        results: several runs of one benchmark at one place are one table, of the rows with the median times.
        picture: the plot of ``bench train``, as the report is to link it.
        keep: sections of ``output`` stay if ``results`` has none with their title.

    Raises:
        ConfigError: a file is missing or is no such result.
    """
    loaded = _merged(medians.of_runs([_load(path) for path in results], _place))
    sections = [_made_of(result, partial(_section, result, picture)) for result in loaded]
    text = report_texts.HEAD + _losses(loaded) + report_texts.COLUMNS + "".join(sections)
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
    kind = result["kind"]
    if kind not in _SECTIONS:
        raise ConfigError(f"no section for results of kind {kind!r}; expected {', '.join(_SECTIONS)}")
    title, body = _SECTIONS[kind]
    drawn = _picture("Loss against seconds and against bytes", picture) if kind == "train" else ""
    text = report_texts.SECTIONS.get(kind, "")
    return f"\n## {title(result)}\n{text}\n{_environment(result)}\n{body(result)}{drawn}"


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
    return report_texts.LOSSES + "\n".join(filter(None, texts)) + "\n"


# --- parts ------------------------------------------------------------------------------------------------------------


def _where(result: Result) -> str:
    environment = result["environment"]
    lab = environment.get("lab")
    job = environment.get("job") or {}
    return f"emulated cluster, {lab}" if lab else f"{job.get('ranks', '?')} ranks on one node"


def _place(result: Result) -> str:
    """Where runs may be compared: on the same ranks, by the same library and with the same tensors."""
    return _made_of(result, lambda: f"{_where(result)}; {_library(result)}; {result.get('network')}")


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
    return f"{e['date']}; {node}; {mpi}Python {e['python']}, {versions}.{_cores(result)}\n"


def _cores(result: Result) -> str:
    """How far apart the cores of two ranks were, and of how many runs the rows are."""
    times = result.get("cache_line_ns") or ()
    if "runs" in result:
        each = f" Each row is that of the run with the median time, of {result['runs']} runs."
        if times:
            each += f" A cache line took {min(times):.0f} to {max(times):.0f} ns between two cores and back."
        return each
    before, after = times or (None, None)
    if before is None or after is None:
        return ""
    return f" A cache line took {before:.0f} ns between two cores and back before, and {after:.0f} ns afterwards."


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


def _placed(what: str) -> Callable[[Result], str]:
    """A title that ends with where the result was measured."""
    return lambda result: f"{what}: {_where(result)}"


def _trained(result: Result) -> str:
    """The title of training runs of one length, and where they were measured."""
    settings = result["settings"]
    return f"Time to accuracy, {settings['workload']}, {settings['steps']} steps: {_where(result)}"


_SECTIONS: dict[str, tuple[Callable[[Result], str], Callable[[Result], str]]] = {
    "compressors": (lambda result: "Compressors", _compressors),
    "train": (_placed("Training"), _train),
    "sync": (_placed("Synchronisation"), _sync),
    "tensors": (lambda result: f"The gradients of {result.get('network')}: {_where(result)}", _tensors),
    "overlap": (_placed("Overlap with computing"), _overlap),
    "collectives": (_placed("Collectives"), _collectives),
    "gpu": (lambda result: f"GPU: {gpu_report.cards_of(result)}", gpu_report.tables),
    "torch": (_placed("Training steps in PyTorch"), _torch),
    "scaling": (_placed("How cost grows"), _scaling),
    "optimizers": (_placed("What the optimizer makes of it"), _optimizers),
    "accuracy": (_trained, _accuracy),
    "planner": (lambda result: "The planner", _planner),
    "validate": (_placed("Predicted and measured steps"), _validate),
}
"""Title and tables of each suite's results, by its name."""
