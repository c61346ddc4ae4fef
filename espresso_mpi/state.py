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
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from . import compressors, device
from .collectives.agreement import documents, fingerprint
from .collectives.executor import OWN
from .collectives.transport import Transport
from .errors import StateError
from .options import Options

VERSION = 3
"""Version 3 added step counters and weights, without which a state cannot be carried over; older ones are refused."""

MANIFEST = "espresso-state.json"

_CARRY = "carry"
_SAME = ("compressor", "route", "plan", "min_bytes", "segment_bytes", "feedback")
_EXECUTORS = ("residual", "sent", "average", "mean")
_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}-([0-9a-f]{16})\.npz(\.[0-9a-f]{8}\.tmp)?")
_LOG = logging.getLogger("espresso_mpi")

State = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """The key of an array in a memory, ``name|n|point|start:stop|what``.

    Attributes:
        name: of the tensor, of ``n`` elements.
        point: number of the encode, ``k-decoded`` after it, or ``carry`` for what is to be cut up.
        start, stop: the elements that the array belongs to.
        what: residual, sent, average, mean, or ``own.`` and the name that a method keeps it by.
    """

    name: str
    n: int
    point: str
    start: int
    stop: int
    what: str

    @classmethod
    def parse(cls, text: Any) -> Key:
        """The parts of a key.

        Raises:
            StateError: it is none.
        """
        found = _KEY.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise StateError(f"state: memory has the key {text!r}; expected name|n|point|start:stop|what")
        name, n, point, start, stop, what = found.groups()
        key = cls(name, int(n), point, int(start), int(stop), what)
        if not key.start <= key.stop <= key.n:
            raise StateError(f"state: memory has the key {text!r}, whose region is not within its {n} elements")
        return key

    @property
    def size(self) -> int:
        """Elements of the region."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name}|{self.n}|{self.point}|{self.start}:{self.stop}|{self.what}"


_KEY = re.compile(r"(.*)\|(\d+)\|(\d+|\d+-decoded|carry)\|(\d+):(\d+)\|([^|]+)", re.DOTALL)


class Memory(dict[str, Any]):
    """What a session keeps from step to step, by key.

    What was carried over from other ranks waits here, whole, until its tensor is synchronised. Between ``begin`` and
    ``end`` of that, whoever asks for the array of a region that is not there gets its share of what was carried over.
    """

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__(content or {})
        self._begun: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self._waiting: dict[tuple[str, int], list[Key]] = {}
        for key in map(Key.parse, self):
            if key.point == _CARRY:
                self._waiting.setdefault((key.name, key.n), []).append(key)

    @property
    def waiting(self) -> bool:
        """Whether something was carried over for any tensor, which it has not taken yet."""
        return bool(self._waiting)

    def owes(self, name: str, n: int) -> bool:
        """Whether something was carried over for a tensor, which it has not taken yet."""
        return (name, n) in self._waiting

    def begin(self, name: str, n: int, fed_back: bool) -> np.ndarray | None:
        """The synchronisation of a tensor, or of a group that is compressed as one, begins.

        Args:
            fed_back: whether it is compressed with plain feedback: then the residual is cut up like the rest.

        Returns:
            None, or the mean residual, float32, shape (n,), that is to be added to the tensor on every rank.
        """
        found = {key.what: self.pop(str(key)) for key in self._waiting.pop((name, n), ())}
        residual = None if fed_back else found.pop("residual", None)
        if found:
            self._begun[name, n] = found
        return residual

    def end(self, name: str, n: int) -> None:
        """The tensor is synchronised: every region that this rank has a part in was asked for."""
        self._begun.pop((name, n), None)

    def __missing__(self, text: str) -> Any:
        if not self._begun:
            raise KeyError(text)
        key = Key.parse(text)
        whole = _whole(key, self._begun.get((key.name, key.n), {}))
        if whole is None:
            raise KeyError(text)
        self[text] = whole[key.start : key.stop].copy()
        return self[text]

    def get(self, key: str, default: Any = None) -> Any:
        """As ``self[key]``, or the default."""
        try:
            return self[key]
        except KeyError:
            return default


def _whole(key: Key, carried: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The array that holds the first content of a region; None if it begins as zeros.

    What the ranks said so far (ef21) is needed at every encode and decode; the rest is of the first encode. Where a
    route has more encodes than that of the state, the later ones go on from the last that there was.
    """
    if key.what not in ("sent", "mean"):
        return carried.get(key.what) if key.point == "0" else None
    known = [point for point in range(int(key.point.partition("-")[0]) + 1) if f"sent.{point}" in carried]
    return carried[f"sent.{known[-1]}"] if known else None


# --- a state of one rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What a session goes on with. ``carried``: whether it comes from other ranks, machines, routes or segments."""

    step: int
    seed: int
    counts: dict[str, int]
    memory: Memory
    weights: dict[str, float]
    carried: bool = False


def snapshot(
    transport: Transport,
    options: Options,
    step: int,
    counts: Mapping[str, int],
    memory: Mapping[str, Any],
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """The state of this rank, as copies.

    Args:
        step: calls of ``sync`` so far; counts: how often each tensor was synchronised.
        memory: arrays of float32, on any device, by key.
        weights: what one unit of the residual of a region adds to the mean, by the key of the residual.
    """
    kept = {}
    for key, value in memory.items():
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
            "counts": {name: int(count) for name, count in counts.items()},
            "weights": {key: float(weight) for key, weight in weights.items()},
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
    for key, (what, fits) in _FIELDS.items():
        if not fits(state.get(key)):
            raise StateError(f"state: {key} is {_short(state.get(key))}; expected {what}; the state is damaged")
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
    if _is_count(version) and version > VERSION:
        cure = f"it was made by a newer espresso_mpi than this, which reads version {VERSION}; update espresso_mpi"
    elif _is_count(version) and version > 0:
        cure = (
            f"it was made by an older espresso_mpi, before step counters were kept by tensor (version {VERSION}); "
            f"go on from the model's weights without it: what compression had not sent yet is lost once"
        )
    else:
        cure = f"expected {VERSION}; pass what state_dict() returned"
    raise StateError(f"state: version is {_short(version)}; {cure}")


def _check_array(key: Key, value: Any) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.ndim != 1:
        got = f"{value.dtype} with shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise StateError(f"state: {str(key)!r} is {got}; expected a flat float32 numpy array")
    own = key.what.startswith(OWN)  # methods' own arrays may have any size, the others are as large as their region
    if not own and key.what not in _EXECUTORS and key.point != _CARRY:
        raise StateError(f"state: {str(key)!r} is of an unknown kind; the state is damaged")
    if (not own or key.point == _CARRY) and value.size != key.size:
        raise StateError(f"state: {str(key)!r} has {value.size} elements; expected {key.size}; the state is damaged")
    if not np.isfinite(value).all():
        raise StateError(f"state: {str(key)!r} has values that are not finite; the state is damaged")


def _in_64_bits(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63 - 1


def _is_count(value: Any) -> bool:
    return _in_64_bits(value) and value >= 0


def _is_text_map(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and fits(v) for key, v in value.items())


def _is_weight(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _are_machines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, list) and all(map(_is_count, group)) for group in value)


_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "rank": ("a rank", _is_count),
    "machines": ("lists of ranks", _are_machines),
    "options": ("options by name", lambda value: _is_text_map(value, lambda _: True)),
    "methods": ("methods by name", lambda value: _is_text_map(value, lambda _: True)),
    "step": ("a number of steps", _is_count),
    "seed": ("a whole number of 64 bits", _in_64_bits),
    "generation": ("text", lambda value: isinstance(value, str)),
    "counts": ("numbers of steps by tensor", lambda value: _is_text_map(value, _is_count)),
    "weights": ("numbers above 0 by key", lambda value: _is_text_map(value, _is_weight)),
    "memory": ("arrays by key", lambda value: isinstance(value, Mapping)),
    "checksum": ("a checksum", _is_count),
}


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
    found = _exchange(transport, {"problem": problem, "states": [_head(state) for state in mine or ()]})
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


def _exchange(transport: Transport, document: Mapping[str, Any]) -> list[Any]:
    """The documents of all ranks, unless one of them tells of a problem.

    Raises:
        StateError: on every rank, with the problems of all.
    """
    found = documents(transport, json.dumps(document).encode())
    ranks: dict[str, list[str]] = {}
    for rank, said in enumerate(found):
        if said["problem"]:
            ranks.setdefault(said["problem"], []).append(transport.describe(rank))
    if ranks:
        everyone = len(found) > 1 and [len(who) for who in ranks.values()] == [len(found)]
        raise StateError(
            "; ".join(f"{'all ranks' if everyone else ', '.join(who)}: {text}" for text, who in ranks.items())
        )
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
    return Loaded(state["step"], state["seed"], dict(state["counts"]), memory, dict(state["weights"]))


# --- carrying over to other ranks -------------------------------------------------------------------------------------


def _carried_over(transport: Transport, options: Options, states: Sequence[State], head: _Head, why: str) -> Loaded:
    """The weighted means of what all old ranks kept, the same bits on every rank."""
    sums, problem = _tried(lambda: _weighted_sums(states, _rules(options)))
    keys, gone = (sorted(sums.sums), sums.gone) if sums else ([], [])
    counts = dict(states[0]["counts"]) if transport.rank == head.brought_by else {}
    found = _exchange(transport, {"problem": problem, "counts": counts, "keys": keys, "gone": gone})
    means = {
        key: _reduced(transport, sums.sums.get(key), Key.parse(key).n)
        for key in sorted({key for document in found for key in document["keys"]})
    }
    if transport.rank == 0:
        gone = sorted({what for document in found for what in document["gone"]})
        anew = f"; what methods keep as {', '.join(gone)} begins anew" if gone else ""
        _LOG.warning("a state is carried over %s: the mean of what was owed is conserved%s", why, anew)
    memory = Memory({key: mean for key, mean in means.items() if mean.any()})
    return Loaded(head.step, head.seed, found[head.brought_by]["counts"], memory, {}, carried=True)


def handed_over(
    transport: Transport,
    memory: Mapping[str, Any],
    weights: Mapping[str, float],
    members: Mapping[str, Sequence[tuple[str, int]]],
) -> dict[str, Any]:
    """What tensors are owed that travel another way from now on: the mean of their residuals, whole. Collective.

    Whatever else was kept of them begins anew.

    Args:
        memory: of the tensors concerned; weights: as for ``snapshot``.
        members: (name, elements) of the tensors that kept something under one name.
    """
    own, found = _Weights(weights), _Sums()
    for text, value in memory.items():
        key = Key.parse(text)
        if key.what == "residual":
            here = np.empty(value.size, np.float32)
            device.copy(here, value)
            weight = 1 / transport.topology.size if key.point == _CARRY else own.of(key)
            found.add(key, weight, here)
    said = _exchange(transport, {"problem": None, "keys": sorted(found.sums)})
    owed: dict[str, Any] = {}
    for text in sorted({key for document in said for key in document["keys"]}):
        key = Key.parse(text)
        mean, first = _reduced(transport, found.sums.get(text), key.n), 0
        for name, n in members.get(key.name, ((key.name, key.n),)):
            owed[str(Key(name, n, _CARRY, 0, n, "residual"))] = mean[first : first + n].copy()
            first += n
    return owed


@dataclass
class _Sums:
    """Float64 sums over some ranks, by the key of what is carried over; ``gone``: what methods keep and lose."""

    sums: dict[str, np.ndarray] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    def add(self, key: Key, weight: float, value: np.ndarray) -> None:
        """``sum[region] += weight · value``."""
        whole = str(Key(key.name, key.n, _CARRY, 0, key.n, key.what))
        if whole not in self.sums:
            self.sums[whole] = np.zeros(key.n)
        self.sums[whole][key.start : key.stop] += weight * value.astype(np.float64)


def _weighted_sums(states: Iterable[State], rules: Mapping[str, str]) -> _Sums:
    found = _Sums()
    for state in states:
        weights, ranks = _Weights(state["weights"]), sum(map(len, state["machines"]))
        for text, value in state["memory"].items():
            key = Key.parse(text)
            if key.point == _CARRY:
                found.add(key, 1 / ranks, value)  # never begun: every rank still has the whole
                continue
            what = _carried_as(key, value, rules)
            if what is not None:
                found.add(Key(key.name, key.n, _CARRY, key.start, key.stop, what), weights.of(key), value)
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


def _rules(options: Options) -> dict[str, str]:
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


class _Weights:
    """Weights of regions, from those by key."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._regions: dict[tuple[str, int, str], list[tuple[int, int, float]]] = {}
        for text, weight in weights.items():
            key = Key.parse(text)
            self._regions.setdefault((key.name, key.n, key.point), []).append((key.start, key.stop, weight))

    def of(self, key: Key) -> float:
        """The weight of the region that holds an array's.

        Raises:
            StateError: there is none.
        """
        for start, stop, weight in self._regions.get((key.name, key.n, key.point), ()):
            if start <= key.start and key.stop <= stop:
                return weight
        raise StateError(f"state: {str(key)!r} has no weight; the state is damaged")


def _reduced(transport: Transport, mine: np.ndarray | None, n: int) -> np.ndarray:
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
    folder, problem = _tried(lambda: Path(path))
    place = {"step": state["step"], "seed": state["seed"], "counters": fingerprint(state["counts"]).hex()}
    found = _exchange(transport, {"problem": problem, "place": place, "generation": os.urandom(8).hex()})
    _check_places([document["place"] for document in found], transport.describe)
    generation = found[0]["generation"]
    file = folder / file_name(transport.rank, transport.topology.size, generation)

    def write() -> None:
        content = sealed({**state, "generation": generation})
        _write(file, lambda out: _write_state(out, content))

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
            _write(folder / MANIFEST, lambda out: out.write(manifest.encode()))

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


def _together(transport: Transport, what: str, act: Callable[[], None]) -> None:
    """Do something on every rank; raise on all if it fails on one."""
    problem = None
    try:
        act()
    except Exception as error:  # the other ranks must hear of anything
        problem = f"{what}: {type(error).__name__}: {error}"
    _exchange(transport, {"problem": problem})


def _write(file: Path, content: Callable[[Any], Any]) -> None:
    """Write a file that is either whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as out:
            content(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


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
    except OSError as error:  # what was saved is complete
        _LOG.warning("%s: files of former saves cannot be removed: %s", folder, error)


def _read_share(folder: Path, rank: int, ranks: int) -> list[State]:
    manifest = _read_manifest(folder)
    generation, count = manifest["generation"], manifest["ranks"]
    names = [(old, file_name(old, count, generation)) for old in range(rank, count, ranks)]
    states = [_checked(_read_state(folder / name)) for _, name in names]
    for (old, name), state in zip(names, states):
        if state["rank"] != old or state["generation"] != generation:
            raise StateError(f"{folder / name}: it is of rank {state['rank']} of another save; was it renamed?")
    return states


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise StateError(
            f"{file}: not found; expected a folder that Session.save wrote, on a disk of this machine"
        ) from None
    except (OSError, ValueError) as error:
        raise StateError(f"{file}: cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(manifest, dict):
        raise StateError(f"{file}: got {type(manifest).__name__}; expected what Session.save wrote")
    _check_version(manifest.get("version"))
    generation = manifest.get("generation")
    if not _is_count(manifest.get("ranks")) or not re.fullmatch("[0-9a-f]{16}", str(generation)):
        raise StateError(f"{file}: ranks or generation are missing or damaged; expected what Session.save wrote")
    return manifest


def _read_state(file: Path) -> State:
    """A state as ``state_dict`` gives it; nothing is unpickled.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            header = json.loads(content["header"].tobytes())
            memory = {key: content[f"array{number}"] for number, key in enumerate(header.pop("keys"))}
    except FileNotFoundError:
        raise StateError(f"{file}: not found; the manifest names it: was the folder copied as a whole?") from None
    except Exception as error:  # zip, numpy and JSON raise a dozen kinds for a damaged file
        raise StateError(f"{file}: damaged, or not written by Session.save: {type(error).__name__}: {error}") from None
    return {**header, "memory": memory}
