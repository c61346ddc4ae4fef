"""What ``bench compressors`` found, as tables for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .harness.columns import RATIO, Column, Table, Unit, size_text

COLD = 4
"""Arrays of so many times the last-level cache are out of it."""

PLAIN = ("copy", "read", "update", "accumulate")
"""Rows of plain kernels, whose best rate is the bound's."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: a compressor's spec, or ``copy``, or a peer's operation such as ``torch topk 1%``.
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


def by_size(rows: Sequence[Row], cache: int) -> dict[str, list[Row]]:
    """The rows of each size, by what that size is beside a cache of so many bytes."""
    found = {}
    for n in dict.fromkeys(row.n for row in rows):
        own = [row for row in rows if row.n == n]
        place = "out of all caches" if own[0].device != "cpu" or 4 * n >= COLD * cache else "may be in cache"
        found[f"{size_text(4 * n)}, {place}"] = own
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


def _name(row: Row, rows: Sequence[Row]) -> str:
    plain = row.method in PLAIN or row.feedback or row.vnmse_expected is None
    return row.method if plain else f"{row.method} (no feedback)"


def _rate(field: str) -> Callable[[Row, Sequence[Row]], float | None]:
    """Bytes of float32 input per second; None where there is no such operation."""

    def value(row: Row, rows: Sequence[Row]) -> float | None:
        seconds = getattr(row, field)
        return 4 * row.n / seconds if seconds else None

    return value


_GB = Unit("", 1e-9, ".2f")
_ERROR = Unit("", 1, ".3g")

TABLE = Table(
    (
        Column("method", _name, left=True),
        Column("threads", lambda row, rows: row.threads or row.device),
        Column("encode GB/s", _rate("encode_s"), _GB),
        Column("best", _rate("encode_best_s"), _GB),
        Column("of bound", "encode_bound_fraction", RATIO),
        Column("decode GB/s", _rate("decode_s"), _GB),
        Column("best", _rate("decode_best_s"), _GB),
        Column("of bound", "decode_bound_fraction", RATIO),
        Column("bits/element", lambda row, rows: 8 * row.payload_bytes / row.n, RATIO),
        Column("vNMSE", "vnmse", _ERROR),
        Column("expected", "vnmse_expected", _ERROR),
        Column("call µs", "launch_s", Unit("", 1e6, ".0f")),
    )
)
