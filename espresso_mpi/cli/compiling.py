"""Says when kernels are compiled, which takes long and happens once: numba keeps them for later processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event

NOTICE = (
    "espresso-mpi: compiling the planner's kernels; this takes up to a minute, and the next command finds them in "
    "numba's cache"
)


class _Notice(event.Listener):
    """Prints a line when the first kernel that the cache lacks is about to be compiled."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: event.Event) -> None:
        if not self.said:
            self.said = True
            print(NOTICE, file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing is said at the end."""


@contextmanager
def announced() -> Iterator[None]:
    """In this block a line on stderr says when kernels have to be compiled; it says nothing if all are cached."""
    with event.install_listener("numba:compile", _Notice()):
        yield
