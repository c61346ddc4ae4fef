"""What all suites do around their measurements: files are checked before, progress is shown, results are published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files.output import check_plot, check_writable, progress, write_rows
from ...tracing import pictures
from .columns import Table
from .cores import roundtrip
from .timing import Repetitions

ONE_RANK = "one rank has nobody to send to; start several with espresso-mpi run -n 4"


@dataclass(frozen=True)
class Suite:
    """One run of a suite.

    Args:
        name: as in ``bench NAME``.
        comm: its ranks; None: it runs in one process.
        json, plot, trace: files to write.

    Raises:
        ConfigError: a file could not be written later on.
    """

    name: str
    comm: Any = None
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None
    _roundtrips: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_writable(self.json)
        check_plot(self.plot)
        pictures.check_trace(self.trace)
        self._look_at_cores()

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes."""
        return self.comm is None or bool(self.comm.rank == 0)

    def note_one_rank(self) -> None:
        """Say so if there is one rank only, which has nobody to send to."""
        if self.comm.size == 1:
            print(f"bench {self.name}: {ONE_RANK}")

    def progress(self, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar for so many ticks."""
        return progress(f"bench {self.name}", total, self.leads)

    @contextmanager
    def repetitions(self, points: int, repeats: int, seconds: float | None) -> Iterator[Repetitions]:
        """How long each of some points is measured, beneath a bar."""
        with self.progress(points * repeats) as tick:
            yield Repetitions(repeats, seconds, tick)

    def publish(self, table: Table, title: str, rows: Sequence[Any], **more: Any) -> None:
        """On rank 0, print the rows, and write them; see ``write``."""
        if self.leads:
            table.show(title, rows)
        self.write(rows, **more)

    def draw(self, picture: Callable[[Path], None]) -> None:
        """On rank 0, draw the plot if there is to be one."""
        if self.leads and self.plot is not None:
            picture(self.plot)
            print(f"wrote {self.plot}")

    def write(self, rows: Sequence[Any], **more: Any) -> None:
        """On rank 0, write the rows to a JSON file if there is to be one, with ``more`` beside them. Collective."""
        self._look_at_cores()
        if self._roundtrips:
            more["cache_line_ns"] = self._roundtrips
        if self.leads and self.json is not None:
            write_rows(self.json, rows, kind=self.name, **more)

    def _look_at_cores(self) -> None:
        """Before and after the measurements."""
        if self.comm is not None and self.json is not None:
            self._roundtrips.append(roundtrip(self.comm))

    @property
    def picture(self) -> str | None:
        """The plot, as the JSON file names it."""
        return None if self.plot is None else str(self.plot)
