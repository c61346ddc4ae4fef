"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(target: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write that takes the place of ``target`` when the with-block ends without an error.

    Args:
        mode: ``"w"`` for text in UTF-8, ``"wb"`` for bytes.

    A reader finds the former file or the whole new one. The new one is made in a directory of its own beside the
    target: nobody can have put something else in its place, and it gets the permissions that any new file would.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent) as folder:
        unfinished = Path(folder, target.name)
        with unfinished.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)


def unfinished(name: str) -> str | None:
    """The name of the file that a process was about to write when it was killed, by the folder that it left."""
    found = re.fullmatch(r"\.(.+)\.[^.]+\.tmp", name)
    return found[1] if found else None
