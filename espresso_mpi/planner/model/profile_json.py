"""The JSON form of a profile, checked entry by entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from msgspec import Meta

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import json_text, schema
from espresso_mpi.files.schema import Count, Ranks, Relative, Seconds

from . import profile_keys
from .curve import Curve
from .profile_keys import CopyDirection

KIND = schema.Kind("espresso_mpi profile", 1, "espresso-mpi profile")

MOST_BYTES = 1 << 26
"""Of a file: with all compressors on two devices it has 1 MB."""

Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class _Document:
    """The content of a file; the attributes are those of ``Profile``, and the curves have text for keys."""

    measured: bool
    nodes: Ranks
    ranks_per_node: Ranks
    call: Seconds
    tensor: Seconds
    segment_bytes: Count
    overlaps: bool
    hidden: Share
    slowed: Relative
    pushed: Seconds
    fingerprint: dict[str, Any]
    environment: dict[str, Any]
    check: Curve
    copies: dict[CopyDirection, Curve]
    moves: dict[str, Curve]
    codecs: dict[str, Curve]
    check_on_gpu: Curve | None = None


_CURVES = {"check", "check_on_gpu", "copies", "moves", "codecs"}
_PLAIN = tuple(f.name for f in fields(_Document) if f.name not in _CURVES)


def encoded(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for JSON from the attributes of a profile by their names."""
    return {
        **KIND.header(),
        **{name: profile[name] for name in _PLAIN},
        "check": profile["check"].to_json(),
        **({} if (there := profile["check_on_gpu"]) is None else {"check_on_gpu": there.to_json()}),
        "copies": {key: curve.to_json() for key, curve in profile["copies"].items()},
        "moves": {profile_keys.move_key(key): curve.to_json() for key, curve in profile["moves"].items()},
        "codecs": {profile_keys.codec_key(key): curve.to_json() for key, curve in profile["codecs"].items()},
    }


def decoded(data: Any) -> dict[str, Any]:
    """The attributes of a profile from what ``encoded`` made.

    Raises:
        ConfigError: it is of another kind or version, an entry is missing or unknown, or a value does not fit.
    """
    found = vars(schema.convert(KIND.content(data), _Document, "profile"))
    codecs = {profile_keys.codec(key): curve for key, curve in found["codecs"].items()}
    moves = {profile_keys.move(key): curve for key, curve in found["moves"].items()}
    return {**found, "codecs": codecs, "moves": moves}


def plain(what: str, value: Any) -> dict[str, Any]:
    """A mapping as JSON gives it back: lists for tuples, text for keys."""
    try:
        text = json.dumps(dict(value), allow_nan=False)
        json_text.refuse(text.encode())  # else it could be written, and not be read
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what}: got {schema.shown(value)} that JSON cannot hold ({error}); expected plain values"
        ) from None
    return dict(found)
