"""The state of one rank as a plain dict of JSON values, and of float32 arrays under ``arrays``."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from ..arrays import device
from ..collectives.messages.transport import Transport
from ..collectives.store_keys import OWN, WHOLE, Key
from ..errors import StateError
from ..options import Options
from .store import SyncState

VERSION = 4
"""Version 4 added which tensors were compressed as one, without which plans cannot change; older ones are refused."""

_SAME = ("compressor", "route", "min_bytes", "segment_bytes", "feedback")
_SAME_IF_GIVEN = ("dense",)
_KINDS = ("residual", "sent", "average", "mean")

StateDict = Mapping[str, Any]


def snapshot(transport: Transport, options: Options, step: int, sync_state: SyncState) -> dict[str, Any]:
    """The state of this rank, as copies; ``step``: number of calls of ``sync`` so far."""
    kept = {}
    for key, value in sync_state.store.items():
        kept[key] = np.empty(value.size, np.float32)
        device.copy(kept[key], value)
    return sealed(
        {
            "version": VERSION,
            "rank": transport.rank,
            **identity(transport, options),
            "step": int(step),
            "seed": int(options.seed),
            "generation": "",
            "counts": {name: int(count) for name, count in sync_state.counts.items()},
            "weights": {key: float(weight) for key, weight in sync_state.weights.items()},
            "groups": _pairs(sync_state.groups),
            "sizes": _pairs(sync_state.sizes),
            "arrays": kept,
        }
    )


def _pairs(by_name: Mapping[str, Iterable[tuple[str, int]]]) -> dict[str, list[list[Any]]]:
    """As JSON values."""
    return {name: [list(pair) for pair in pairs] for name, pairs in by_name.items()}


def sealed(state: StateDict) -> dict[str, Any]:
    """The state with the checksum of its content: a damaged state would make replicas differ."""
    return {**state, "checksum": _checksum(state)}


def identity(transport: Transport, options: Options) -> dict[str, Any]:
    """What must be equal for a state to be loaded exactly."""
    described = options.described()
    return {
        "nodes": [list(ranks) for ranks in transport.topology.nodes],
        "options": {key: described[key] for key in _SAME}
        | {"plan": options.plan.digest if options.plan else None}
        | {key: list(described[key]) for key in _SAME_IF_GIVEN if described[key]},
        "methods": _methods(options),
    }


def _methods(options: Options) -> dict[str, Any]:
    """How tensors are compressed, by whatever route: what must be equal for a state to be resharded."""
    plan = options.plan
    if plan is None:
        return {"feedback": str(options.feedback), "compressor": options.compressor}
    return {
        "feedback": str(options.feedback),
        "compressor of other tensors": plan.default.compressor if plan.default else None,
        **{f"compressor of {name!r}": strategy.compressor for name, strategy in plan.strategies.items()},
        "groups": [list(group) for group in plan.groups],
    }


def _checksum(state: StateDict) -> int:
    arrays = state["arrays"]
    head = {key: value for key, value in state.items() if key not in ("arrays", "checksum")}
    total = zlib.crc32(json.dumps(head, sort_keys=True).encode())
    for key in sorted(arrays):
        total = zlib.crc32(arrays[key].tobytes(), zlib.crc32(key.encode(), total))
    return total


def checked(state: Any) -> StateDict:
    """Check that a state is complete and undamaged, for whatever session.

    Raises:
        StateError: it is of another version, incomplete or damaged.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state: got {type(state).__name__}; expected what state_dict() returned, or a list of such")
    check_version(state.get("version"))
    _check_types(state)
    ranks = sorted(itertools.chain.from_iterable(state["nodes"]))
    if ranks != list(range(len(ranks))) or not 0 <= state["rank"] < len(ranks):
        raise StateError(f"state: rank is {state['rank']} and nodes {state['nodes']!r}; the state is damaged")
    for key, value in state["arrays"].items():
        _check_array(Key.parse(key), value)
    if _checksum(state) != state["checksum"]:
        raise StateError("state: it is not what was saved (the checksum differs): something is missing or damaged")
    return state


def check_version(version: Any) -> None:
    if version == VERSION:
        return
    known = isinstance(version, int) and not isinstance(version, bool)
    if known and version > VERSION:
        cure = f"it was made by a newer espresso_mpi than this, which reads version {VERSION}; update espresso_mpi"
    elif known and version > 0:
        cure = (
            f"it was made by an older espresso_mpi than this, which reads version {VERSION}; go on from "
            f"the model's weights without it: what compression had not sent yet is lost once"
        )
    else:
        cure = f"expected {VERSION}; pass what state_dict() returned"
    raise StateError(f"state: version is {short(version)}; {cure}")


def _check_array(key: Key, value: Any) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.ndim != 1:
        got = f"{value.dtype} with shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise StateError(f"state: {str(key)!r} is {got}; expected a flat float32 numpy array")
    own = key.what.startswith(OWN)  # methods' own arrays may have any size, the others are as large as their region
    if not own and key.what not in _KINDS and key.point != WHOLE:
        raise StateError(f"state: {str(key)!r} is of an unknown kind; the state is damaged")
    if key.point == WHOLE and key.size != key.n:
        raise StateError(f"state: {str(key)!r} is not of the whole tensor; the state is damaged")
    if (not own or key.point == WHOLE) and value.size != key.size:
        raise StateError(f"state: {str(key)!r} has {value.size} elements; expected {key.size}; the state is damaged")
    if not np.isfinite(value).all():
        raise StateError(f"state: {str(key)!r} has values that are not finite; the state is damaged")


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Schema(msgspec.Struct):
    """The types of a state's values."""

    rank: _Count
    nodes: list[list[_Count]]
    options: dict[str, Any]
    methods: dict[str, Any]
    step: _Count
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    generation: str
    counts: dict[str, _Count]
    weights: dict[str, _Weight]
    groups: dict[str, Annotated[list[tuple[str, _Count]], msgspec.Meta(min_length=2)]]
    sizes: dict[str, list[tuple[str, _Count]]]
    arrays: dict[Any, Any]
    checksum: _Count


def _check_types(state: StateDict) -> None:
    try:
        msgspec.convert(state, _Schema)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", place)[0] or "a key"
        got = f" is {short(state[name])}" if name in state else ""
        raise StateError(f"state: {name}{got}: {said}; the state is damaged") from None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."
