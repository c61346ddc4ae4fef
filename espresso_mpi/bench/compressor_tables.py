"""What ``bench compressors`` found, as tables for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .harness.columns import size_text

COLD = 4
"""Arrays of so many times the last-level cache are out of it."""

PLAIN = ("copy", "read", "update", "accumulate")
"""Rows of plain kernels, whose best rate is the bound's."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: a compressor's spelling, or ``copy``, or a peer's operation such as ``torch topk 1%``.
        device: ``cpu`` or ``cuda``; threads: those that the kernels may use (0 on a GPU).
        n: float32 elements.
        feedback: whether the encode that was timed has a residual.
        encode_s, decode_s: median seconds of encode and of decode_add; 0 where there is no such operation.
        encode_bound_fraction, decode_bound_fraction: the share of the memory bound that the best call reaches; None for
            peers, and for arrays that caches may hold.
        payload_bytes: size of the payload.
        vnmse: measured ``‖x - C(x)‖² / ‖x‖²`` on normal values, without feedback.
        vnmse_expected: what analysis says of it; None where it is not known.
        launch_s: the same encode of one element: the cost of the call itself.
        encode_best_s, decode_best_s: the least seconds of each.
    """

    method: str
    device: str
    threads: int
    n: int
    feedback: bool
    encode_s: float
    decode_s: float
    encode_bound_fraction: float | None
    decode_bound_fraction: float | None
    payload_bytes: int
    vnmse: float | None
    vnmse_expected: float | None
    launch_s: float | None = None
    encode_best_s: float = 0.0
    decode_best_s: float = 0.0


def tables(rows: Sequence[Row], cache: int) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Heading and lines of a table for each size, by what that size is beside a cache of so many bytes."""
    found = {}
    for n in dict.fromkeys(row.n for row in rows):
        own = [row for row in rows if row.n == n]
        place = "out of all caches" if own[0].device != "cpu" or 4 * n >= COLD * cache else "may be in cache"
        found[f"{size_text(4 * n)}, {place}"] = table(own)
    return found


def above(rows: Sequence[Row]) -> str:
    """What is to be said of shares above 1, if there are any: how much the yardstick itself varied."""
    notes = []
    for threads in dict.fromkeys(row.threads for row in rows):
        own = [row for row in rows if row.threads == threads]
        over = [
            f"{row.method} {name} {share:.2f}"
            for row in own
            for name, share in (("encode", row.encode_bound_fraction), ("decode", row.decode_bound_fraction))
            if share is not None and round(share, 2) > 1
        ]
        plain = max((r for r in own if r.method in PLAIN), key=lambda r: r.encode_bound_fraction or 0.0)
        varied = f"{plain.method} took {plain.encode_s / plain.encode_best_s:.2f} times its best in the median"
        if over:
            notes.append(f"Above 1 with {threads or 'all'} threads: {', '.join(over)}. The yardstick varied: {varied}.")
    return " ".join(notes)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heading and lines of the table that people read."""
    header = ["method", "threads", "encode GB/s", "best", "of bound", "decode GB/s", "best", "of bound", "bits/element",
              "vNMSE", "expected", "call µs"]  # fmt: skip
    return header, [_line(row) for row in rows]


def _line(row: Row) -> list[str]:
    def rate(seconds: float) -> str:
        return f"{4 * row.n / seconds / 1e9:.2f}" if seconds else ""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def error(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    plain = row.method in PLAIN
    name = row.method if plain or row.feedback or row.vnmse_expected is None else f"{row.method} (no feedback)"
    return [
        name, str(row.threads or row.device), rate(row.encode_s), rate(row.encode_best_s),
        share(row.encode_bound_fraction), rate(row.decode_s), rate(row.decode_best_s), share(row.decode_bound_fraction),
        f"{8 * row.payload_bytes / row.n:.2f}", error(row.vnmse), error(row.vnmse_expected),
        "" if row.launch_s is None else f"{row.launch_s * 1e6:.0f}",
    ]  # fmt: skip
