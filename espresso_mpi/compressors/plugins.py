"""Compressors of other packages: entry points of the group ``espresso_mpi.compressors``, ``name = "module:Class"``.

Reading them takes some milliseconds and loading one runs the code of its package, so neither happens before somebody
asks for a name that is not built in, or for all names.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "espresso_mpi.compressors"


@lru_cache(maxsize=1)
def installed() -> dict[str, EntryPoint]:
    """The entry points by name; nothing is imported.

    Raises:
        ConfigError: two packages offer the same name.
    """
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        known = found.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise ConfigError(
                f"compressor {entry.name!r} is offered twice: by {origin(known)}, and by {origin(entry)}; "
                "uninstall one of them"
            )
    return found


def load(entry: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        ConfigError: it cannot be imported; the message names the package and the entry point.
    """
    try:
        return entry.load()
    except Exception as error:  # whatever the code of another package raises
        raise ConfigError(
            f"compressor {entry.name!r}: {origin(entry)}, cannot be loaded ({type(error).__name__}: {error}); "
            "mend or uninstall that package"
        ) from error


def origin(entry: EntryPoint) -> str:
    """The package and the entry point, for messages."""
    package = "an unknown package" if entry.dist is None else f"package {entry.dist.name} {entry.dist.version}"
    return f"{package}, entry point {entry.name} = {entry.value}"
