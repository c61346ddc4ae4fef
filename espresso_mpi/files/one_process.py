"""A lock among processes, on one node or on several that share a file system."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

PATIENCE_S = 120.0
"""Longer than any kernel takes to compile. A process that has waited so long goes on, and waits for no lock again."""

_POLL_S = 0.005


class OneProcess:
    """Lets one process at a time do something whose result the others then find.

    The lock only saves work: it is given up, without an error, where the file system has no locks or where another
    process holds it for ``PATIENCE_S``. The process that has it can take it again; only the last ``release`` counts.

    Args:
        path: of a file that exists while some process holds the lock or waits for it.

    Attributes:
        depth: how often it was acquired and not yet released.
        patient: whether this process still waits for others: not if one kept a lock, perhaps on a node that has died.
    """

    patient = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self.depth = 0

    def acquire(self) -> None:
        """Wait until no other process has the lock."""
        self.depth += 1
        until = time.monotonic() + PATIENCE_S
        while self._file is None and OneProcess.patient:
            try:
                self._file = self._opened()
            except OSError:  # a directory that cannot be written, a file system without locks
                return
            OneProcess.patient = self._file is not None or time.monotonic() < until

    def release(self) -> None:
        """Let the next process have it."""
        self.depth -= 1
        if self.depth or self._file is None:
            return
        self._path.unlink(missing_ok=True)  # before others can get the lock: it is still this process's file
        os.close(self._file)
        self._file = None

    def _opened(self) -> int | None:
        """The locked file; None: somebody else has it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == self._path.stat().st_ino:  # the holder before may have removed it
                return file
        except (BlockingIOError, FileNotFoundError):
            time.sleep(_POLL_S)
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None
