"""``bench report``: BENCHMARKS.md from the JSON results of benchmarks, with machine, versions and date."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from espresso_mpi.errors import ConfigError

Result = Mapping[str, Any]

_HEAD = """# Benchmarks

Written by `make bench`. Ratios within one run are what counts: the methods take turns in every repetition, so that a
noisy moment of the machine meets all of them. Absolute times are this machine's.
"""

_SYNC = """
## What the columns mean

One float32 array of each size, on every rank. *median* and *p99* are over repetitions, of the slowest rank of each.
*x fp32* and *x fp16* are the time of `MPI_Allreduce` on the same array, as it is and cast to float16 (casts included,
summed by our kernel, which beats MPI's own half type), divided by the method's: below 1 the method loses. *between
machines* is what all ranks together send over links in one synchronisation. *wrong* counts elements that differ from
the reference: the float64 mean for dense, the sum of decoded payloads bit for bit for compressed methods. On the
emulated cluster a link that has paused lets the first 2 ms of data (250 kB at 1 Gbit) pass at full speed, so sizes
below that show latency only.
"""

_COMPRESSORS = """
`make bench-compressors`. GB/s are of float32 input. *of bound*: the least time that the method's memory traffic could
take, at the bandwidth of the plain copy in the first row, divided by the time it took; above 1 where the traffic is
kinder to the caches than a copy's. Encode includes the residual, eight of the twelve bytes an element that it reads and
writes, except in the rows that say so: those methods refuse error feedback. *vNMSE* is ‖x − C(x)‖²/‖x‖² on normal
values, *expected* what analysis says of it. *call* is the time to encode one element.
"""

_TRAIN = """
A character language model on the English text in Python's `pydoc_data.topics`, plain SGD, the same weights, batches and
learning rate for all methods. *loss* is bits a character on held-out text. *s to target*: training time until fp32's
final loss + 2 %. A step's time is split into compute (the slowest rank's) and sync. Validation is outside the clock.
"""


def main(*, results: Sequence[Path], output: Path, picture: Path | None = None) -> None:
    """Write ``output`` from the results of the benchmarks.

    Args:
        picture: the plot of ``bench train``, as the report is to link it.

    Raises:
        ConfigError: a file is missing or is no such result.
    """
    sections = [_section(_load(path)) for path in results]
    if picture is not None:
        sections.append(f"\n![Loss against seconds and against bytes]({picture})\n")
    output.write_text(_HEAD + _SYNC + "".join(sections))
    print(f"wrote {output}")


def _load(path: Path) -> Result:
    try:
        result = json.loads(path.read_text())
        return {"environment": result["environment"], "rows": result["rows"], **result}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not the JSON result of a benchmark ({error}); make one with bench ... --json"
        ) from None


def _section(result: Result) -> str:
    where = _where(result["environment"])
    if any("encode_bound_fraction" in row for row in result["rows"]):
        return f"\n## Compressors\n{_COMPRESSORS}\n{_environment(result)}\n{_compressors(result['rows'])}"
    if "curves" in result:
        return f"\n## Training: {where}\n{_TRAIN}\n{_environment(result)}\n{_train(result)}"
    return f"\n## Synchronisation: {where}\n\n{_environment(result)}\n{_sync(result['rows'])}"


def _where(environment: Result) -> str:
    lab = environment.get("lab")
    job = environment.get("job") or {}
    return f"emulated cluster, {lab}" if lab else f"{job.get('ranks', '?')} ranks on one machine"


def _environment(result: Result) -> str:
    e = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version)
    mpi = " ".join(str(part) for part in [(e["mpi"] or {}).get("library"), (e["mpi"] or {}).get("version")] if part)
    memory = f"{e['memory_bytes'] / 2**30:.0f} GiB"
    machine = f"{e['cpu']}, {e['cores']} cores, {memory}; {e['system']}"
    mpi = f"{mpi}; " if mpi else ""
    return f"{e['date']}; {machine}; {mpi}Python {e['python']}, {versions}.\n"


def _table(header: Sequence[str], lines: Iterator[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _sync(rows: Sequence[Result]) -> str:
    seconds = {(row["nbytes"], row["method"]): row["seconds"] for row in rows}

    def line(row: Result) -> list[str]:
        ratios = [seconds[row["nbytes"], f"mpi-allreduce-{kind}"] / row["seconds"] for kind in ("fp32", "fp16")]
        return [
            size_text(row["nbytes"]),
            row["method"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['p99'] * 1e3:.2f}",
            *(f"{ratio:.2f}" for ratio in ratios),
            "" if row["inter_bytes"] is None else f"{row['inter_bytes']:,}",
            str(row["wrong"]),
        ]

    header = ["size", "method", "median ms", "p99 ms", "x fp32", "x fp16", "bytes between machines", "wrong"]
    return _table(header, map(line, rows))


def size_text(nbytes: int) -> str:
    """A size as people write it."""
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def _compressors(rows: Sequence[Result]) -> str:
    from .compressors import Row, table

    header, lines = table([Row(**row) for row in rows])
    return _table(header, iter(lines))


def _train(result: Result) -> str:
    def line(row: Result) -> list[str]:
        bytes_ = row["bytes_per_step"]
        return [
            row["method"],
            _number(row["loss"], ".4f"),
            _number(row["loss_vs_fp32"], "+.2f"),
            _number(row["seconds_to_target"], ".1f"),
            f"{row['compute_seconds'] * 1e3:.1f}",
            f"{row['sync_seconds'] * 1e3:.1f}",
            f"{bytes_.get('intra', 0):,.0f}",
            f"{bytes_.get('inter', 0):,.0f}",
            "yes" if row["replicas_identical"] else "NO",
        ]

    header = ["method", "loss", "vs fp32 %", "s to target", "compute ms", "sync ms", "bytes in machine",
              "bytes between", "identical"]  # fmt: skip
    corpus = result["corpus"]
    note = f"\nText: {corpus['characters']} characters, SHA-256 `{corpus['sha256']}`. Bytes are a rank's, a step.\n"
    return _table(header, map(line, result["rows"])) + note


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
