"""The result of ``gpu-check`` as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..harness.columns import markdown as markdown_table

COPY_GOALS: tuple[tuple[tuple[str, ...] | None, float], ...] = (
    (
        (
            *("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "natural", "onebit", "onebit_sgd", "signsgd", "signum"),
            *("int2", "int4", "int8", "qsgd", "natural_dithering", "terngrad", "topk_chunked"),
        ),
        0.7,
    ),
    (None, 0.4),
)
"""Methods, and the share of the bound by memory that they are to reach; None: all others."""

HIDDEN_GOAL = 0.8
"""The share of the shorter of backward pass and synchronisation that ``push`` is to hide."""

_WORDS = {True: "yes", False: "NO", None: "–"}


@dataclass(frozen=True)
class PromiseResult:
    """A promise, what was found, the goal, and whether it is kept; None: it is not one that can be broken."""

    promise: str
    found: str
    goal: str
    kept: bool | None


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report."""
    versions = {k: v for k, v in result["environment"].get("versions", {}).items() if v}
    head = f"GPU: {cards_of(result)}; " + ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{head}\n\n{tables(result)}"


def cards_of(result: Mapping[str, Any]) -> str:
    """The names of the GPUs."""
    cards = result["gpus"]
    return ", ".join(card["name"] for card in cards) if isinstance(cards, list) else str(cards)


def tables(result: Mapping[str, Any]) -> str:
    """The results, and what was measured."""
    return "\n".join(part for part in _parts(result) if part)


def _parts(result: Mapping[str, Any]) -> Iterator[str]:
    yield markdown_table(
        ("promise", "found", "goal", "kept"),
        [(v["promise"], v["found"], v["goal"], _WORDS[v["kept"]]) for v in result["rows"]],
    )
    yield _of_speeds(result.get("speeds", ()))
    ranks = result.get("ranks", "")
    if not isinstance(ranks, str):
        where = f"{ranks.get('ranks', 2)} ranks on {_count(ranks.get('gpus', 1))}"
        yield _of_overlap(ranks["overlap"], where)
        yield _of_sizes(ranks["sizes"], where)
    beside = result.get("beside", ())
    yield beside if isinstance(beside, str) else _of_beside(beside)
    sanitizer = result.get("sanitizer", "")
    if not isinstance(sanitizer, str) and sanitizer["status"]:
        yield f"compute-sanitizer, of {sanitizer['methods']}:\n\n```text\n{sanitizer['said'].strip()}\n```\n"


def _of_speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        (
            row["method"],
            _rate(row["n"], row["encode_best_s"]), _share(row["encode_bound_fraction"]),
            _rate(row["n"], row["decode_best_s"]), _share(row["decode_bound_fraction"]),
            "" if row["launch_s"] is None else f"{row['launch_s'] * 1e6:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    title = "Kernels at 10⁸ float32 elements, best of five; a call is an encode of one element."
    header = ("method", "encode GB/s", "of bound", "decode_add GB/s", "of bound", "call µs")
    return f"{title}\n\n{markdown_table(header, lines)}" if lines else ""


def _count(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"{gpus} GPUs"


def _of_overlap(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    lines = [(row["method"], *(_ms(row[key]) for key in _TIMES), f"{row['hidden']:.2f}") for row in rows]
    title = f"{where}; milliseconds of a backward pass of matrix products with 12 gradients of 16 MiB."
    header = ("method", "backward", "sync", "one after the other", "with push", "hidden")
    return f"{title}\n\n{markdown_table(header, lines)}"


_TIMES = ("backward_s", "sync_s", "one_by_one_s", "pushed_s")


def _of_sizes(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    lines = [
        (row["method"], str(row["nbytes"]), *(_ms(row[key]) if key in row else "" for key in _SIZE_TIMES))
        for row in rows
    ]
    title = f"{where}; milliseconds of `sync` of one array. It is staged as well where MPI takes device pointers."
    return f"{title}\n\n{markdown_table(('method', 'bytes', 'on the GPU', 'staged', 'in host memory'), lines)}"


_SIZE_TIMES = ("gpu_s", "staged_s", "host_s")


def _of_beside(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [(r["method"], *(_ms(r[key]) for key in _BESIDE_TIMES), f"{r['overlapped']:.2f}") for r in rows]
    title = "Encodes beside matrix products on another stream; milliseconds until each has ended."
    header = ("method", "encodes alone", "beside", "products alone", "beside", "share hidden")
    return f"{title}\n\n{markdown_table(header, lines)}" if lines else ""


_BESIDE_TIMES = ("encode_s", "encode_beside_s", "product_s", "product_beside_s")


def _rate(n: int, seconds: float) -> str:
    return f"{4 * n / seconds / 1e9:.0f}" if seconds else ""


def _share(value: float | None) -> str:
    return "" if not value else f"{value:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
