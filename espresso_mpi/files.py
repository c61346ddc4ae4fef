"""Files that are replaced as a whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(target: Path) -> Iterator[TextIO]:
    """A text file to write in UTF-8 that takes the place of ``target`` when the with-block ends without an error.

    A reader finds the former file or the whole new one. The new one is made in a directory of its own beside the
    target: nobody can have put something else in its place, and it gets the permissions that any new file would.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent) as folder:
        unfinished = Path(folder, target.name)
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.replace(target)
