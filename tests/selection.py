"""Taking tests out of a run, for ``--quick``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def deselect(config: Any, items: list[Any], unwanted: Callable[[Any], Any]) -> None:
    """Take the items for which ``unwanted`` holds out of the run; pytest counts them as deselected."""
    out = [item for item in items if unwanted(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not unwanted(item)]
