"""What training needs to go on: states of a session as values and as files, on the same ranks or on others.

A *state* is what one rank keeps: a plain dict of JSON values, and of float32 arrays under ``memory``. Loaded into a
session like the one it was made by it continues bit for bit. Loaded into a session with other ranks, machines, routes
or segments it is *carried over*: what is kept by region and rank becomes its weighted mean, one array for the whole
tensor that every rank gets and cuts up into its own regions when it synchronises the tensor next. docs/state.md has the
rules.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from .. import compressors
from ..arrays import device
from ..collectives.executor import OWN
from ..collectives.messages.agreement import documents, fingerprint
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, EspressoError, StateError
from ..files import schema
from ..files.atomic import replacing, unfinished
from ..options import Options
from .memory import CARRY, ByTensor, Keeping, Key, Memory, Weights

VERSION = 4
"""Version 4 added which tensors were compressed as one, without which plans cannot change; older ones are refused."""

MANIFEST = "espresso-state.json"
_MANIFEST_BYTES = 1 << 16
_HEADER_BYTES = 1 << 28
"""Of what a state says besides its arrays: some 200 bytes a tensor."""

_SAME = ("compressor", "route", "plan", "min_bytes", "segment_bytes", "feedback")
_EXECUTORS = ("residual", "sent", "average", "mean")
_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}-([0-9a-f]{16})\.npz")
_LOG = logging.getLogger("espresso_mpi")

State = Mapping[str, Any]


# --- a state of one rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What a session goes on with. ``carried``: whether it comes from other ranks, machines, routes or segments."""

    step: int
    seed: int
    keeping: Keeping
    carried: bool = False


def snapshot(transport: Transport, options: Options, step: int, keeping: Keeping) -> dict[str, Any]:
    """The state of this rank, as copies; ``step``: calls of ``sync`` so far."""
    kept = {}
    for key, value in keeping.memory.items():
        kept[key] = np.empty(value.size, np.float32)
        device.copy(kept[key], value)
    return sealed(
        {
            "version": VERSION,
            "rank": transport.rank,
            **_identity(transport, options),
            "step": int(step),
            "seed": int(options.seed),
            "generation": "",
            "counts": {name: int(count) for name, count in keeping.counts.items()},
            "weights": {key: float(weight) for key, weight in keeping.weights.items()},
            "groups": _pairs(keeping.groups),
            "sizes": _pairs(keeping.sizes),
            "memory": kept,
        }
    )


def sealed(state: State) -> dict[str, Any]:
    """The state with the checksum of its content: what one rank has lost would make its replica another one."""
    return {**state, "checksum": _checksum(state)}


def _identity(transport: Transport, options: Options) -> dict[str, Any]:
    """What must be equal for a state to be continued exactly."""
    described = options.described()
    return {
        "machines": [list(ranks) for ranks in transport.topology.machines],
        "options": {key: described[key] for key in _SAME},
        "methods": _methods(options),
    }


def _methods(options: Options) -> dict[str, Any]:
    """How tensors are compressed, whichever way they travel: what must be equal for a state to be carried over."""
    plan = options.plan
    if plan is None:
        return {"feedback": str(options.feedback), "compressor": options.compressor}
    return {
        "feedback": str(options.feedback),
        "compressor of other tensors": plan.default.compressor if plan.default else None,
        **{f"compressor of {name!r}": strategy.compressor for name, strategy in plan.strategies.items()},
        "groups": [list(group) for group in plan.groups],
    }


def _checksum(state: State) -> int:
    memory = state["memory"]
    head = {key: value for key, value in state.items() if key not in ("memory", "checksum")}
    total = zlib.crc32(json.dumps(head, sort_keys=True).encode())
    for key in sorted(memory):
        total = zlib.crc32(memory[key].tobytes(), zlib.crc32(key.encode(), total))
    return total


def _checked(state: Any) -> State:
    """A state that is whole, whatever session it is for.

    Raises:
        StateError: it is of another version, incomplete or damaged.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state: got {type(state).__name__}; expected what state_dict() returned, or a list of such")
    _check_version(state.get("version"))
    _check_types(state)
    ranks = sorted(itertools.chain.from_iterable(state["machines"]))
    if ranks != list(range(len(ranks))) or not 0 <= state["rank"] < len(ranks):
        raise StateError(f"state: rank is {state['rank']} and machines {state['machines']!r}; the state is damaged")
    for key, value in state["memory"].items():
        _check_array(Key.parse(key), value)
    if _checksum(state) != state["checksum"]:
        raise StateError("state: it is not what was saved (the checksum differs): something is missing or damaged")
    return state


def _check_version(version: Any) -> None:
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
    raise StateError(f"state: version is {_short(version)}; {cure}")


def _check_array(key: Key, value: Any) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.ndim != 1:
        got = f"{value.dtype} with shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise StateError(f"state: {str(key)!r} is {got}; expected a flat float32 numpy array")
    own = key.what.startswith(OWN)  # methods' own arrays may have any size, the others are as large as their region
    if not own and key.what not in _EXECUTORS and key.point != CARRY:
        raise StateError(f"state: {str(key)!r} is of an unknown kind; the state is damaged")
    if key.point == CARRY and key.size != key.n:
        raise StateError(f"state: {str(key)!r} is not of the whole tensor; the state is damaged")
    if (not own or key.point == CARRY) and value.size != key.size:
        raise StateError(f"state: {str(key)!r} has {value.size} elements; expected {key.size}; the state is damaged")
    if not np.isfinite(value).all():
        raise StateError(f"state: {str(key)!r} has values that are not finite; the state is damaged")


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Schema(msgspec.Struct):
    """The types of a state's values."""

    rank: _Count
    machines: list[list[_Count]]
    options: dict[str, Any]
    methods: dict[str, Any]
    step: _Count
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    generation: str
    counts: dict[str, _Count]
    weights: dict[str, _Weight]
    groups: dict[str, Annotated[list[tuple[str, _Count]], msgspec.Meta(min_length=2)]]
    sizes: dict[str, list[tuple[str, _Count]]]
    memory: dict[Any, Any]
    checksum: _Count


def _check_types(state: State) -> None:
    try:
        msgspec.convert(state, _Schema)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", place)[0] or "a key"
        got = f" is {_short(state[name])}" if name in state else ""
        raise StateError(f"state: {name}{got}: {said}; the state is damaged") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


# --- loading ----------------------------------------------------------------------------------------------------------


def load(transport: Transport, options: Options, states: State | Sequence[State]) -> Loaded:
    """What a session goes on with, from the states that the ranks bring. Collective.

    Args:
        states: this rank's own, or any number of states of other ranks: together the ranks must bring that of every
            rank which the session had, once.

    Raises:
        StateError: on every rank, if any state is of another version or damaged, if states are missing, there twice, or
            of different checkpoints, or do not fit this session.
        RankTimeoutError: a rank did not come.
    """
    return _load(transport, options, lambda: _listed(states))


def _listed(states: Any) -> Sequence[Any]:
    return states if isinstance(states, (list, tuple)) else [states]


def _load(transport: Transport, options: Options, bring: Callable[[], Sequence[Any]]) -> Loaded:
    mine, problem = _tried(lambda: [_checked(state) for state in bring()])
    found = exchange(transport, {"problem": problem, "states": [_head(state) for state in mine or ()]})
    heads = [_Head(rank, **head) for rank, document in enumerate(found) for head in document["states"]]
    _check_together(heads, transport.describe)
    identity = _identity(transport, options)
    _check_methods(heads[0].methods, identity["methods"])
    own = [(head.brought_by, head.rank) for head in heads] == [(rank, rank) for rank in range(transport.topology.size)]
    if own and heads[0].options == identity["options"] and heads[0].machines == identity["machines"]:
        assert mine is not None
        return _continued(mine[0])
    return _carried_over(transport, options, mine or [], heads[0], _difference(heads[0], identity))


def _difference(head: _Head, identity: Mapping[str, Any]) -> str:
    """Why a state is not continued exactly."""
    if head.machines != identity["machines"]:
        return f"from ranks {head.machines} by machine to {identity['machines']}"
    for key, value in identity["options"].items():
        if head.options.get(key) != value:
            return f"from {key} {_short(head.options.get(key))} to {_short(value)}"
    return "as its ranks are dealt out otherwise"


def _tried(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """What came out, or what went wrong: a rank with a wrong state still has to meet the others to say so."""
    try:
        return act(), None
    except StateError as error:
        return None, str(error)
    except Exception as error:  # whatever was passed for a state; the other ranks must hear of it
        return None, f"state: cannot be used: {type(error).__name__}: {error}"


def exchange(transport: Transport, document: Mapping[str, Any], kind: type[EspressoError] = StateError) -> list[Any]:
    """The documents of all ranks, unless one of them tells of a problem.

    Raises:
        kind: on every rank, with the problems of all.
    """
    found = documents(transport, json.dumps(document).encode())
    ranks: dict[str, list[str]] = {}
    for rank, said in enumerate(found):
        if said["problem"]:
            ranks.setdefault(said["problem"], []).append(transport.describe(rank))
    if ranks:
        everyone = len(found) > 1 and [len(who) for who in ranks.values()] == [len(found)]
        raise kind("; ".join(f"{'all ranks' if everyone else ', '.join(who)}: {text}" for text, who in ranks.items()))
    return found


@dataclass(frozen=True)
class _Head:
    """What all ranks are told about a state. ``counters``: a digest of the tensors' step counters."""

    brought_by: int
    rank: int
    machines: list[list[int]]
    options: dict[str, Any]
    methods: dict[str, Any]
    step: int
    seed: int
    counters: str
    generation: str

    @property
    def ranks(self) -> int:
        """How many ranks there were."""
        return sum(map(len, self.machines))


def _head(state: State) -> dict[str, Any]:
    kept = ("rank", "machines", "options", "methods", "step", "seed", "generation")
    return {**{key: state[key] for key in kept}, "counters": fingerprint(dict(state["counts"])).hex()}


def _check_together(heads: Sequence[_Head], describe: Callable[[int], str]) -> None:
    """Refuse states that are not those of every rank of one job at one moment."""
    if not heads:
        raise StateError("no rank brought a state; pass what state_dict() returned on at least one of them")
    first = heads[0]
    for head in heads:
        for key in ("step", "seed", "generation", "machines", "options", "methods", "counters"):
            a, b = getattr(first, key), getattr(head, key)
            if a != b:
                raise StateError(
                    f"the states are not of one checkpoint: {key} is {_short(a)} in that of rank {first.rank}, brought "
                    f"by {describe(first.brought_by)}, and {_short(b)} in that of rank {head.rank}, brought by "
                    f"{describe(head.brought_by)}; load the states that all ranks saved at one step"
                )
    _check_complete(heads, describe)


def _check_complete(heads: Sequence[_Head], describe: Callable[[int], str]) -> None:
    bringers: dict[int, list[str]] = {}
    for head in heads:
        bringers.setdefault(head.rank, []).append(describe(head.brought_by))
    ranks = heads[0].ranks
    said = [f"that of rank {rank} is missing" for rank in range(ranks) if rank not in bringers]
    said += [f"that of rank {rank} came from {' and '.join(who)}" for rank, who in bringers.items() if len(who) > 1]
    if said:
        more = f" and {len(said) - 8} more" if len(said) > 8 else ""
        raise StateError(
            f"the states of {ranks} rank(s) were expected, each once, but {', '.join(said[:8])}{more}; pass on every "
            f"rank its own, or share the states of all old ranks among the new ones, as lists"
        )


def _check_methods(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            raise StateError(
                f"the state was made with {key} {_short(theirs.get(key))}, this session has {_short(ours.get(key))}; "
                f"what one keeps means nothing to the other: open the session with the same"
            )


def _continued(state: State) -> Loaded:
    memory = Memory({key: value.copy() for key, value in state["memory"].items()})
    return Loaded(state["step"], state["seed"], _keeping(memory, state["weights"], state))


def _keeping(memory: Memory, weights: Mapping[str, float], said: Mapping[str, Any]) -> Keeping:
    """What a session keeps: this rank's memory, and what is the same on all ranks, from a state."""
    groups = {name: tuple((member, n) for member, n in members) for name, members in said["groups"].items()}
    sizes = {label: [(kept, n) for kept, n in used] for label, used in said["sizes"].items()}
    return Keeping(memory, ByTensor(weights), Counter(said["counts"]), groups, sizes)


def _pairs(by_name: Mapping[str, Iterable[tuple[str, int]]]) -> dict[str, list[list[Any]]]:
    """As JSON values."""
    return {name: [list(pair) for pair in pairs] for name, pairs in by_name.items()}


# --- carrying over to other ranks -------------------------------------------------------------------------------------


def _carried_over(transport: Transport, options: Options, states: Sequence[State], head: _Head, why: str) -> Loaded:
    """The weighted means of what all old ranks kept, the same bits on every rank."""
    sums, problem = _tried(lambda: _weighted_sums(states, rules(options)))
    keys, gone = (sorted(sums.sums), sums.gone) if sums else ([], [])
    chosen = {key: states[0][key] for key in ("counts", "groups", "sizes")} if transport.rank == head.brought_by else {}
    found = exchange(transport, {"problem": problem, "chosen": chosen, "keys": keys, "gone": gone})
    means = {
        key: reduced(transport, sums.sums.get(key), Key.parse(key).n)
        for key in sorted({key for document in found for key in document["keys"]})
    }
    if transport.rank == 0:
        gone = sorted({what for document in found for what in document["gone"]})
        anew = f"; what methods keep as {', '.join(gone)} begins anew" if gone else ""
        _LOG.warning("a state is carried over %s: the mean of what was owed is conserved%s", why, anew)
    memory = Memory({key: mean for key, mean in means.items() if mean.any()})
    keeping = _keeping(memory, {}, found[head.brought_by]["chosen"])
    return Loaded(head.step, head.seed, keeping, carried=True)


@dataclass
class Sums:
    """Float64 sums over some ranks, by the key of what is carried over; ``gone``: what methods keep and lose."""

    sums: dict[str, np.ndarray] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    def add(self, key: Key, weight: float, value: np.ndarray) -> None:
        """``sum[region] += weight · value``."""
        whole = str(Key(key.name, key.n, CARRY, 0, key.n, key.what))
        if whole not in self.sums:
            self.sums[whole] = np.zeros(key.n)
        self.sums[whole][key.start : key.stop] += weight * value.astype(np.float64)


def _weighted_sums(states: Iterable[State], rules: Mapping[str, str]) -> Sums:
    found = Sums()
    for state in states:
        weights, ranks = Weights(state["weights"]), sum(map(len, state["machines"]))
        for text, value in state["memory"].items():
            key = Key.parse(text)
            if key.point == CARRY:
                found.add(key, 1 / ranks, value)  # never begun: every rank still has the whole
                continue
            what = _carried_as(key, value, rules)
            if what is not None:
                found.add(Key(key.name, key.n, CARRY, key.start, key.stop, what), weights.of(key), value)
            elif key.what.startswith(OWN):
                found.gone.append(key.what[len(OWN) :])
    found.gone = sorted(set(found.gone))
    return found


def _carried_as(key: Key, value: np.ndarray, rules: Mapping[str, str]) -> str | None:
    """The kind that an array is carried over as; None if it begins anew."""
    if not key.what.startswith(OWN):
        return {"sent": f"sent.{key.point}", "mean": None}.get(key.what, key.what)
    rule = rules.get(key.what[len(OWN) :])
    if rule is None:
        raise StateError(
            f"{str(key)!r} cannot be carried over to other ranks, machines, routes or segments: its compressor "
            f"does not say what becomes of it; name it in the compressor's ``keeps``, or load it where it was saved"
        )
    if rule == "forget" or key.point != "0":
        return None
    if value.size != key.size:
        raise StateError(
            f"{str(key)!r} has {value.size} elements for a region of {key.size}, so it cannot be averaged as its "
            f"compressor's ``keeps`` says; make that 'forget', or load it where it was saved"
        )
    return key.what


def rules(options: Options) -> dict[str, str]:
    """What becomes of what the session's compressors keep, by name.

    Raises:
        StateError: two compressors of a plan keep different things under one name.
    """
    rules: dict[str, str] = {}
    plan = options.plan
    named = [*plan.strategies.values(), plan.default] if plan else []
    spellings = {s.compressor for s in named if s is not None} if plan else {options.compressor}
    for spelling in sorted(spellings - {"none"}):
        for what, rule in compressors.get(spelling).keeps.items():
            if rules.setdefault(what, rule) != rule:
                raise StateError(f"compressors of the plan disagree about what becomes of {what!r}; load it elsewhere")
    return rules


def reduced(transport: Transport, mine: np.ndarray | None, n: int) -> np.ndarray:
    """The sum over the ranks as float32, shape (n,): each piece summed once, in rank order, and copied."""
    count, rank = transport.topology.size, transport.rank
    partial = np.zeros(n) if mine is None else mine
    edges = [n * r // count for r in range(count + 1)]
    pieces = [partial[a:b] for a, b in itertools.pairwise(edges)]
    rows = [pieces[rank] if r == rank else np.empty(pieces[rank].size) for r in range(count)]
    others = [(rank + k) % count for k in range(1, count)]
    transport.exchange([(r, pieces[r]) for r in others], [(r, rows[r]) for r in others])
    total = np.empty(n, np.float32)
    results = [total[a:b] for a, b in itertools.pairwise(edges)]
    results[rank][:] = sum(rows[1:], rows[0])
    transport.exchange([(r, results[rank]) for r in others], [(r, results[r]) for r in others])
    return total


# --- files ------------------------------------------------------------------------------------------------------------


def save(transport: Transport, state: State, path: str | os.PathLike[str]) -> None:
    """Write the ranks' states into a folder, one file a rank. Collective.

    The manifest is replaced when all files are there, so a save that fails leaves the one before as it was. It is
    written on every machine, so that folders which machines do not share do for the same ranks.

    Raises:
        StateError: on every rank: a file cannot be written, or the ranks are at different steps.
        RankTimeoutError: a rank did not come.
    """
    folder, problem = _tried(lambda: Path(path).resolve())
    place = {"step": state["step"], "seed": state["seed"], "counters": fingerprint(state["counts"]).hex()}
    found = exchange(
        transport, {"problem": problem, "place": place, "folder": str(folder), "generation": secrets.token_hex(8)}
    )
    _check_places([document["place"] for document in found], transport.describe)
    _check_folders([document["folder"] for document in found], transport)
    generation = found[0]["generation"]
    file = folder / file_name(transport.rank, transport.topology.size, generation)

    def write() -> None:
        content = sealed({**state, "generation": generation})
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as out:
            _write_state(out, content)

    try:
        _together(transport, f"{file}: cannot be written", write)
    except StateError:
        with contextlib.suppress(OSError):  # it may be what could not be written
            file.unlink(missing_ok=True)
        raise
    _publish(transport, folder, generation)


def _publish(transport: Transport, folder: Path, generation: str) -> None:
    """Name a save that is complete in the manifest, and clear away the others."""
    manifest = json.dumps({"version": VERSION, "ranks": transport.topology.size, "generation": generation}) + "\n"
    first = transport.rank == transport.machine[0]

    def write() -> None:
        if first:
            with replacing(folder / MANIFEST) as out:
                out.write(manifest)

    _together(transport, f"{folder / MANIFEST}: cannot be written", write)
    if first:
        _remove_others(folder, generation)


def load_files(transport: Transport, options: Options, path: str | os.PathLike[str]) -> Loaded:
    """As ``load``, from a folder that ``save`` wrote; each rank reads its share of the files. Collective.

    Raises:
        StateError: on every rank, as ``load``, or if a file is missing, damaged or of another save.
        RankTimeoutError: a rank did not come.
    """
    return _load(transport, options, lambda: _read_share(Path(path), transport.rank, transport.topology.size))


def file_name(rank: int, ranks: int, generation: str) -> str:
    """The file of a rank in a folder of states; ``generation``: 16 hexadecimal digits that one save has in common."""
    return f"rank-{rank:05}-of-{ranks:05}-{generation}.npz"


def _check_places(places: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
    for rank, place in enumerate(places):
        for key, value in place.items():
            if value != places[0][key]:
                raise StateError(
                    f"the ranks are not at the same place: {key} is {_short(places[0][key])} on {describe(0)}, "
                    f"{_short(value)} on {describe(rank)}; save after the same step on every rank"
                )


def _check_folders(folders: Sequence[str], transport: Transport) -> None:
    """Refuse to save a machine's ranks into different folders: none of these could be loaded."""
    for machine in transport.topology.machines:
        other = next((rank for rank in machine if folders[rank] != folders[machine[0]]), None)
        if other is not None:
            raise StateError(
                f"save: the path is {folders[machine[0]]} on {transport.describe(machine[0])}, {folders[other]} on "
                f"{transport.describe(other)}; pass the same folder on every rank: each writes a file of its own there"
            )


def _together(transport: Transport, what: str, act: Callable[[], None]) -> None:
    """Do something on every rank; raise on all if it fails on one."""
    problem = None
    try:
        act()
    except Exception as error:  # the other ranks must hear of anything
        problem = f"{what}: {type(error).__name__}: {error}"
    exchange(transport, {"problem": problem})


def _write_state(out: Any, state: State) -> None:
    """A header of JSON as bytes, and the arrays by number: their keys may have characters that files cannot."""
    keys = list(state["memory"])
    header = {**{key: value for key, value in state.items() if key != "memory"}, "keys": keys}
    arrays = {f"array{number}": state["memory"][key] for number, key in enumerate(keys)}
    np.savez(out, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def _remove_others(folder: Path, generation: str) -> None:
    """Clear away what former saves left, now that nothing names it; another rank may do so at the same time."""
    try:
        for file in list(folder.iterdir()):
            found = _FILE.fullmatch(file.name)
            if found and found[1] != generation:
                file.unlink(missing_ok=True)
            left = unfinished(file.name)
            if left is not None and (left == MANIFEST or _FILE.fullmatch(left)):
                shutil.rmtree(file, ignore_errors=True)
    except OSError as error:  # what was saved is complete
        _LOG.warning("%s: files of former saves cannot be removed: %s", folder, error)


def _read_share(folder: Path, rank: int, ranks: int) -> list[State]:
    manifest = _read_manifest(folder)
    generation, count = manifest["generation"], manifest["ranks"]
    states = []
    for old in range(rank, count, ranks):
        file = folder / file_name(old, count, generation)
        states.append(_checked(_read_state(file)))
        if states[-1]["rank"] != old or states[-1]["generation"] != generation:
            raise StateError(f"{file}: it is of rank {states[-1]['rank']} of another save; was it renamed?")
    return states


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    file = folder / MANIFEST
    if not file.exists():
        raise StateError(f"{file}: not found; expected a folder that Session.save wrote, on a disk of this machine")
    try:
        manifest = schema.load(file, lambda document: document, _MANIFEST_BYTES)
    except ConfigError as error:
        raise StateError(f"{error}; expected what Session.save wrote") from None
    if not isinstance(manifest, dict):
        raise StateError(f"{file}: got {type(manifest).__name__}; expected what Session.save wrote")
    _check_version(manifest.get("version"))
    ranks, generation = manifest.get("ranks"), manifest.get("generation")
    if type(ranks) is not int or ranks < 1 or not re.fullmatch("[0-9a-f]{16}", str(generation)):
        raise StateError(f"{file}: ranks or generation are missing or damaged; expected what Session.save wrote")
    return manifest


def _read_state(file: Path) -> State:
    """A state as ``state_dict`` gives it; nothing is unpickled.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            if content.zip.getinfo("header.npy").file_size > _HEADER_BYTES:
                raise ValueError(f"its header has more than {_HEADER_BYTES} bytes")
            header = schema.parse(content["header"].tobytes())
            memory = {key: content[f"array{number}"] for number, key in enumerate(header.pop("keys"))}
    except FileNotFoundError:
        raise StateError(f"{file}: not found; the manifest names it: was the folder copied as a whole?") from None
    except Exception as error:  # zip, numpy and JSON raise a dozen kinds for a damaged file
        raise StateError(f"{file}: damaged, or not written by Session.save: {type(error).__name__}: {error}") from None
    return {**header, "memory": memory}
