"""``gpu-check``: every promise of the GPU support, tried on this node's GPU, with a result for each."""

from __future__ import annotations

import json as json_of
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...cluster.environment import environment, gpus
from ...cluster.launch import child_environment, cores, find_mpirun
from ...collectives.messages import probe
from ...errors import ConfigError, EspressoError
from ...files.output import check_plot, check_writable, progress, write_result
from .. import compressors as speeds
from ..defaults import GpuCheck as Defaults
from . import kernels, pictures
from .report import COPY_GOALS, HIDDEN_GOAL, PromiseResult, markdown

SIZES = (0, 1, 65, 2000, 1_000_003, 10_000_019)
"""Elements that kernels are compared with."""

LARGE, LARGE_METHODS = 100_000_007, ("fp16", "int8", "onebit", "topk", "topk_in_chunks", "randomk", "thc")
"""Elements that one method of each family is compared with as well."""

_WORKERS, _LARGE_WORKERS = 12, 3
"""Processes that compare kernels at most: each takes half a gigabyte of the GPU's memory, and with the large arrays two
gigabytes, and four of the host's."""

_BESIDE = ("int8", "onebit")
_BESIDE_ELEMENTS, _BESIDE_SIDE = 50_000_000, 8192
_RANKS_LIMIT_S = 300
_SANITIZED = "fp16,int8,onebit,topk,powersgd"


def main(
    only: str = Defaults.only, json: Path | None = None, output: Path | None = None, plot: Path | None = None
) -> int:
    """Run the parts, print the report, and write it if asked.

    Args:
        only: comma list of parts.
        json, output, plot: files for the result, as JSON, as Markdown and as a picture.

    Returns:
        0 if every promise is kept, 1 if not.

    Raises:
        ConfigError: there is no GPU, no such part, or a file cannot be written.
    """
    check_writable(json)
    check_writable(output, "--output")
    check_plot(plot)
    parts: dict[str, Callable[[], Any]] = {
        "kernels": _kernels, "speeds": _speeds, "beside": _beside, "pointers": _pointers, "ranks": _ranks,
        "sanitizer": _sanitizer,
    }  # fmt: skip
    wanted = only.split(",")
    if not set(wanted) <= set(parts):
        raise ConfigError(f"--only {only}; expected some of {','.join(parts)}")
    speeds.require_gpu("gpu-check")
    result: dict[str, Any] = {"kind": "gpu", "environment": environment(), "gpus": gpus()}
    result |= {part: run() for part, run in parts.items() if part in wanted}
    result["rows"] = [asdict(one) for one in promise_results(result)]
    text = markdown(result)
    print(text)
    if json is not None:
        write_result(json, result)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        print(f"wrote {output}")
    if plot is not None:
        pictures.draw(result, plot)
        print(f"wrote {plot}")
    return 0 if all(one["kept"] is not False for one in result["rows"]) else 1


def _kernels() -> dict[str, Any]:
    specs = speeds.variants()
    with progress("kernels", len(specs) + len(LARGE_METHODS)) as tick:
        found = kernels.compare_in_processes(specs, SIZES, min(_WORKERS, cores()), tick)
        found += kernels.compare_in_processes(LARGE_METHODS, (LARGE,), min(_LARGE_WORKERS, cores()), tick)
    return {
        "methods": len(specs),
        "sizes": list(SIZES),
        "large_methods": list(LARGE_METHODS),
        "differences": [asdict(one) for one in found],
    }


def _pointers() -> dict[str, Any]:
    return asdict(probe.probe_gpu())


def _speeds() -> list[dict[str, Any]]:
    return [asdict(row) for row in speeds.main(device="cuda", repeats=5)]


def _beside() -> list[dict[str, Any]] | str:
    try:
        from . import beside

        found = [beside.measure(method, _BESIDE_ELEMENTS, _BESIDE_SIDE) for method in _BESIDE]
    except ImportError:
        return "CuPy is not installed"
    return [{**asdict(one), "both_s": one.both_s, "overlapped": one.overlapped} for one in found]


def _ranks() -> dict[str, Any] | str:
    """What the job of a rank for each GPU found, of two at least, or why it found nothing."""
    cards = gpus()
    count = max(2, len(cards) if isinstance(cards, list) else 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        program = [sys.executable, "-m", "mpi4py", "-m", "espresso_mpi.bench.gpu.ranks", str(path)]
        try:
            command = [find_mpirun().path, "-n", str(count), *program]
            done = subprocess.run(
                command,
                env=child_environment(count),
                capture_output=True,
                text=True,
                timeout=_RANKS_LIMIT_S,
                check=False,
            )
        except EspressoError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return f"the job of {count} ranks took longer than {_RANKS_LIMIT_S} s"
        if done.returncode or not path.exists():
            return f"the job of {count} ranks ended with {done.returncode}: {done.stderr[-2000:]}"
        found: dict[str, Any] = json_of.loads(path.read_text(encoding="utf-8"))
        return found


def _sanitizer() -> dict[str, Any] | str:
    """What compute-sanitizer says of kernels of each family; why it says nothing."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not installed"
    code = (
        "from espresso_mpi.bench.gpu import kernels; "
        f"print(len(kernels.compare({_SANITIZED.split(',')!r}, (65, 2000))))"
    )
    command = [tool, "--error-exitcode", "9", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RANKS_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {_RANKS_LIMIT_S} s"
    return {"methods": _SANITIZED, "status": done.returncode, "said": (done.stdout + done.stderr)[-2000:]}


# --- results ----------------------------------------------------------------------------------------------------------


def promise_results(result: Mapping[str, Any]) -> list[PromiseResult]:
    """A result for each promise; ``kept`` is None where nothing was measured."""
    makers: dict[str, Callable[[Any], Iterator[PromiseResult]]] = {
        "kernels": _of_kernels, "speeds": _of_speeds, "beside": _of_beside, "ranks": _of_ranks,
        "pointers": _of_pointers, "sanitizer": _of_sanitizer,
    }  # fmt: skip
    return [one for part, make in makers.items() if part in result for one in make(result[part])]


def _of_kernels(part: Mapping[str, Any]) -> Iterator[PromiseResult]:
    found = f"{len(part['differences'])} differences in {part['methods']} methods, {len(part['sizes'])} sizes each"
    found += f", and in {len(part['large_methods'])} with 10⁸ elements"
    yield PromiseResult("kernels write the bytes of the CPU's", found, "none", not part["differences"])


def _of_speeds(rows: Sequence[Mapping[str, Any]]) -> Iterator[PromiseResult]:
    by_name = {row["method"]: row for row in rows}
    for names, goal in COPY_GOALS:
        shares = [
            (by_name[name][f"{what}_bound_fraction"], f"{name} {what}")
            for name in (names or [n for n, r in by_name.items() if r["encode_bound_fraction"] and n not in _NAMED])
            if name in by_name
            for what in ("encode", "decode")
            if by_name[name][f"{what}_bound_fraction"]
        ]
        title = "casts, signs, block quantisers, chunked top-k" if names else "all other methods"
        if shares:
            least, which = min(shares)
            below = sum(share < goal for share, _ in shares)
            found = f"least {least:.2f} ({which}); {below} of {len(shares)} below"
            yield PromiseResult(f"share of the bound by memory: {title}", found, f"≥ {goal}", least >= goal)


_NAMED = (*(COPY_GOALS[0][0] or ()), "copy")


def _of_beside(part: Sequence[Mapping[str, Any]] | str) -> Iterator[PromiseResult]:
    if isinstance(part, str):
        return
    for row in part:
        slower = (row[f"{what}_beside_s"] / row[f"{what}_s"] for what in ("encode", "product"))
        found = "{:.2f} and {:.2f} times as long as alone".format(*slower)
        yield PromiseResult(f"{row['method']}: encodes and matrix products side by side", found, "–", None)


def _of_ranks(part: Mapping[str, Any] | str) -> Iterator[PromiseResult]:
    if isinstance(part, str):
        yield PromiseResult("ranks on GPUs", part, "a result", False)
        return
    routes = part["routes"]
    found = f"{len(routes['wrong'])} of {routes['runs']} runs differ"
    yield PromiseResult(
        "sessions give the bits of host arrays on every named route", found, "none", not routes["wrong"]
    )
    bad = part["sessions"]
    yield PromiseResult("two sessions in two threads", f"{bad} elements differ", "none", not bad)
    bad = part["side_stream"]
    yield PromiseResult("values that a side stream writes late", f"{bad} of 20 results are wrong", "none", not bad)
    count = part["synchronises"]
    yield PromiseResult("waits of the host for a stream or an event in ten calls", str(count), "none", not count)
    for row in part["overlap"]:
        found = f"{row['hidden']:.2f}"
        yield PromiseResult(
            f"share that push hides: {row['method']}", found, f"≥ {HIDDEN_GOAL}", row["hidden"] >= HIDDEN_GOAL
        )


def _of_pointers(part: Mapping[str, Any]) -> Iterator[PromiseResult]:
    found = f"{'they work' if part['works'] else 'messages are staged'}: {part['why']}"
    yield PromiseResult("device pointers to MPI", found, "as the library can", None)


def _of_sanitizer(part: Mapping[str, Any] | str) -> Iterator[PromiseResult]:
    found, kept = (part, None) if isinstance(part, str) else (_said(part), part["status"] == 0)
    yield PromiseResult("compute-sanitizer finds no fault", found, "0", kept)


def _said(part: Mapping[str, Any]) -> str:
    """The exit status of compute-sanitizer, with its summary if there is one."""
    lines = [line.strip("= ") for line in part["said"].splitlines() if "SUMMARY" in line]
    return ": ".join([f"exit status {part['status']}", *lines[-1:]])
