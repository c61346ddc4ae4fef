"""What the curves of a profile are found by, and how a file writes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from espresso_mpi.errors import ConfigError
from espresso_mpi.types import DeviceKind, Level, Op

Direction = Literal["encode", "decode"]
CopyDirection = Literal["to_host", "to_gpu"]
Codec = tuple[Annotated[str, Meta(min_length=1)], DeviceKind, Direction]
Move = tuple[Op, Level, bool]


def codec_key(key: Codec) -> str:
    """Such as ``onebit|cpu|encode``."""
    return "|".join(key)


def move_key(key: Move) -> str:
    """Such as ``alltoall@inter|alone``."""
    op, level, alone = key
    return f"{op}@{level}" + ("|alone" if alone else "")


def codec(key: str) -> Any:
    """What ``codec_key`` writes; its parts are not checked.

    Raises:
        ConfigError: it has another number of parts.
    """
    if key.count("|") != 2:
        raise ConfigError(
            f"profile: codecs: got the key {key!r}; expected spec, cpu or gpu, encode or decode, such as "
            f"'onebit|cpu|encode'"
        )
    return tuple(key.split("|"))


def move(key: str) -> Any:
    """What ``move_key`` writes; its parts are not checked."""
    op, _, rest = key.partition("@")
    level, bar, alone = rest.partition("|")
    return op, level, (alone == "alone" or alone) if bar else False
