"""Files of results that are written after every run, so that a later call goes on where the last one stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import GenericAlias
from typing import Any, Generic, TypeVar

from ...errors import ConfigError
from ...files import output, schema

R = TypeVar("R")


def begin(kind: str, json: Path | None, conditions: Mapping[str, Any], row: type[Any]) -> dict[str, Any]:
    """What the JSON file holds, or will hold before the first run.

    Args:
        kind: of the result, which is also the name of the suite.
        conditions: what all runs of a file have in common.
        row: the dataclass of a run.

    Raises:
        ConfigError: there is a file with something else, or with runs under other conditions.
    """
    before = held(kind, json, row)
    rows = rows_of(before["rows"], row) if before else []
    for name, value in conditions.items():
        if before and before["settings"].get(name) != value:
            raise ConfigError(
                f"--json {json}: holds runs with {name} {before['settings'].get(name)}, this call has {value}; "
                "name another file, or call it as then"
            )
    return output.result_of(rows, kind=kind, settings=dict(conditions))


def held(kind: str, json: Path | None, row: type[Any], option: str = "--json") -> dict[str, Any] | None:
    """What an earlier call wrote to the file, if it is there.

    Raises:
        ConfigError: the file holds something else.
    """
    if json is None or not json.exists():
        return None
    try:
        result: dict[str, Any] = schema.parse(schema.contents(json, output.RESULT_BYTES))
        if result["kind"] != kind or not isinstance(result["settings"], dict):
            raise ValueError("it holds something else")
        rows_of(result["rows"], row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{option} {json}: there is such a file, but not of bench {kind} ({error}); name another one"
        ) from None
    return result


def rows_of(raw: Any, row: type[R]) -> list[R]:
    """Rows from what a JSON file holds.

    Raises:
        ConfigError: an entry has other fields.
    """
    rows: Any = GenericAlias(list, (row,))
    found: list[R] = schema.convert(raw, rows, "rows")
    return found


class KeptRuns(Generic[R]):
    """The runs of earlier calls and of this one.

    Args:
        start: what ``begin`` returned.
        row: the dataclass of a run.
        path: the file that they are written to, on one rank only.
        line: one run, as it ends, in words.
    """

    def __init__(self, start: dict[str, Any], row: type[R], path: Path | None, line: Callable[[R], str]) -> None:
        self._start, self._path, self._line = start, path, line
        self.rows: list[R] = rows_of(start["rows"], row)

    def add(self, row: R) -> None:
        """Keep a run, and write all of them at once: the next one may be interrupted."""
        self.rows.append(row)
        if self._path is not None:
            schema.write(self._path, self.result())
            print(f"{self._line(row)}; wrote {self._path}", file=sys.stderr, flush=True)

    def result(self) -> dict[str, Any]:
        """What the file holds."""
        return {**self._start, "rows": [asdict(row) for row in self.rows]}  # type: ignore[call-overload]
