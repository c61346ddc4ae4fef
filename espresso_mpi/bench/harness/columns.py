"""Tables of results: a suite lists its columns once, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...files.output import show


@dataclass(frozen=True)
class Unit:
    """How a value is written: times ``factor``, in this format, then ``sign``; ``none`` for None, and text as it is."""

    name: str = ""
    factor: float = 1
    format: str = ""
    sign: str = ""
    none: str = ""

    def text(self, value: Any) -> str:
        """The value as people read it."""
        if value is None or isinstance(value, str):
            return self.none if value is None else value
        return format(value if self.factor == 1 else value * self.factor, self.format) + self.sign


PLAIN = Unit()
MS = Unit("ms", 1e3, ".2f")
US = Unit("µs", 1e6, ",.1f")
MB = Unit("MB", 1e-6, ".1f")
GB_PER_S = Unit("GB/s", 1e-9, ".3f")
S_PER_GB = Unit("s/GB", 1e9, ".2f")
BYTES = Unit("", 1, ",")
RATIO = Unit("", 1, ".2f")
SHARE = Unit("", 1, ".0%")
PERCENT = Unit("", 100, ".1f", " %")
PERCENT_2 = Unit("", 100, ".2f", " %")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading, before the unit's name.
        value: name of the row's field; or what makes the value of the row and of all rows of the table.
        unit: how the value is written.
        left: a column of text.
    """

    title: str
    value: str | Callable[[Any, Sequence[Any]], Any]
    unit: Unit = PLAIN
    left: bool = False

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} {self.unit.name}".strip()

    def text(self, row: Any, rows: Sequence[Any]) -> str:
        """What stands in the column for a row."""
        return self.unit.text(getattr(row, self.value) if isinstance(self.value, str) else self.value(row, rows))


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: from left to right.
        stacked: their headings are printed word below word, which makes them narrow.
        summary: the lines below those of the rows: what the rows come to.
    """

    columns: Sequence[Column]
    stacked: bool = False
    summary: Callable[[Sequence[Any]], list[list[str]]] = lambda rows: []

    @property
    def header(self) -> list[str]:
        """The headings."""
        return [column.heading for column in self.columns]

    def lines(self, rows: Sequence[Any]) -> list[list[str]]:
        """The cells of every row, and of the summary."""
        return [[column.text(row, rows) for column in self.columns] for row in rows] + self.summary(rows)

    def show(self, title: str, rows: Sequence[Any]) -> None:
        """Print it."""
        header = [heading.replace(" ", "\n") if self.stacked else heading for heading in self.header]
        left = [heading for heading, column in zip(header, self.columns) if column.left]
        show(title, header, self.lines(rows), left)

    def markdown(self, rows: Sequence[Any]) -> str:
        """The same for a page."""
        return markdown(self.header, self.lines(rows))


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *lines]) + "\n"


def size_text(nbytes: int) -> str:
    """A size as people write it."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


SIZE = Column("size", lambda row, rows: size_text(row.nbytes))
METHOD = Column("method", "method", left=True)
TIMES = (Column("median", "seconds", MS), Column("p99", "p99", MS))
BANDWIDTHS = (Column("algbw", "algbw", GB_PER_S), Column("busbw", "busbw", GB_PER_S))
CPU = (
    Column("cpu", "cpu", S_PER_GB),
    Column("kernels", lambda row, rows: row.kernels / row.cpu if row.kernels and row.cpu else None, SHARE),
)
WRONG = Column("wrong", "wrong")
"""Columns of every collective's table."""
