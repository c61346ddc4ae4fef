"""Loading states: exactly on the same ranks, resharded on others.

A session like the one that made the state continues bit for bit. For a session with other ranks, nodes, routes or
segments, the state is *resharded*; see ``resharding``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..collectives.messages.agreement import fingerprint, on_every_rank
from ..collectives.messages.transport import Transport
from ..collectives.store_keys import Key
from ..errors import StateError
from ..options import Options
from .resharding import reduced, reshard_rules, weighted_sums
from .snapshots import StateDict, checked, identity, short
from .store import ByTensor, StateStore, SyncState

USING = "state: cannot be used"
"""Begins the error if a user's value, passed as a state, raises any exception."""

_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class Loaded:
    """What a session continues with. ``resharded``: the state is of other ranks, nodes, routes or segments."""

    step: int
    seed: int
    sync_state: SyncState
    resharded: bool = False


def load(transport: Transport, options: Options, states: StateDict | Sequence[StateDict]) -> Loaded:
    """Load the states that the ranks pass. Collective.

    Args:
        transport: the messages.
        options: the options of the session.
        states: the state of this rank, or any number of states of other ranks. Together, the ranks must pass the state
            of every former rank once.

    Raises:
        StateError: on every rank, if a state is of another version or damaged, if states are missing, duplicate or of
            different checkpoints, or if they do not fit this session.
        RankTimeoutError: a rank did not come.
    """
    return load_brought(transport, options, lambda: _listed(states))


def _listed(states: Any) -> Sequence[Any]:
    return states if isinstance(states, (list, tuple)) else [states]


def load_brought(transport: Transport, options: Options, bring: Callable[[], Sequence[Any]]) -> Loaded:
    """As ``load``, with the states that ``bring`` returns; what it raises is an error on every rank. Collective."""
    mine, said = on_every_rank(
        transport,
        lambda: [checked(state) for state in bring()],
        StateError,
        doing=USING,
        say=lambda states: [_head(state) for state in states],
    )
    heads = [_Head(rank, **head) for rank, brought in enumerate(said) for head in brought]
    _check_together(heads, transport.describe)
    ours = identity(transport, options)
    _check_methods(heads[0].methods, ours["methods"])
    own = [(head.brought_by, head.rank) for head in heads] == [(rank, rank) for rank in range(transport.topology.size)]
    if own and heads[0].options == ours["options"] and heads[0].nodes == ours["nodes"]:
        return _continued(mine[0])
    return _resharded(transport, options, mine, heads[0], _difference(heads[0], ours))


def _difference(head: _Head, ours: Mapping[str, Any]) -> str:
    """The reason for resharding."""
    if head.nodes != ours["nodes"]:
        return f"from ranks {head.nodes} by node to {ours['nodes']}"
    for key in {**ours["options"], **head.options}:
        before, now = head.options.get(key), ours["options"].get(key)
        if before != now:
            return f"from {key} {short(before)} to {short(now)}"
    return "since its ranks are assigned differently"


@dataclass(frozen=True)
class _Head:
    """What all ranks learn about a state. ``counters``: a digest of the tensors' step counters."""

    brought_by: int
    rank: int
    nodes: list[list[int]]
    options: dict[str, Any]
    methods: dict[str, Any]
    step: int
    seed: int
    counters: str
    generation: str

    @property
    def ranks(self) -> int:
        """Number of former ranks."""
        return sum(map(len, self.nodes))


def _head(state: StateDict) -> dict[str, Any]:
    kept = {key: state[key] for key in ("rank", "nodes", "options", "methods", "step", "seed", "generation")}
    plan = kept["options"].get("plan")
    if isinstance(plan, str):  # in states of earlier versions, what the plan was made for follows
        kept["options"] = {**kept["options"], "plan": plan.partition(",")[0]}
    return {**kept, "counters": fingerprint(dict(state["counts"])).hex()}


def _check_together(heads: Sequence[_Head], describe: Callable[[int], str]) -> None:
    """Refuse states that are not those of all ranks of one job at one step."""
    if not heads:
        raise StateError("no rank brought a state; pass what state_dict() returned on at least one of them")
    first = heads[0]
    for head in heads:
        for key in ("step", "seed", "generation", "nodes", "options", "methods", "counters"):
            a, b = getattr(first, key), getattr(head, key)
            if a != b:
                raise StateError(
                    f"the states are not of one checkpoint: {key} is {short(a)} in that of rank {first.rank}, brought "
                    f"by {describe(first.brought_by)}, and {short(b)} in that of rank {head.rank}, brought by "
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
    hint = ""
    if ("groups" in theirs) != ("groups" in ours):  # one of the sessions has a plan
        hint = (
            ", and with the plan that it followed, if any: save_plan(session.plan, path) or Tuning.plan_file keeps it"
        )
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            raise StateError(
                f"the state was made with {key} {short(theirs.get(key))}, this session has {short(ours.get(key))}; "
                f"what one keeps means nothing to the other: open the session with the same{hint}"
            )


def _continued(state: StateDict) -> Loaded:
    store = StateStore({key: value.copy() for key, value in state["arrays"].items()})
    return Loaded(state["step"], state["seed"], _sync_state(store, state["weights"], state))


def _sync_state(store: StateStore, weights: Mapping[str, float], said: Mapping[str, Any]) -> SyncState:
    """The state of a session: this rank's store, and what is the same on all ranks."""
    groups = {name: tuple((member, n) for member, n in members) for name, members in said["groups"].items()}
    sizes = {label: [(kept, n) for kept, n in used] for label, used in said["sizes"].items()}
    return SyncState(store, ByTensor(weights), Counter(said["counts"]), groups, sizes)


def _resharded(transport: Transport, options: Options, states: Sequence[StateDict], head: _Head, why: str) -> Loaded:
    """The weighted means of the state of all former ranks, the same bits on every rank."""
    chosen = {key: states[0][key] for key in ("counts", "groups", "sizes")} if transport.rank == head.brought_by else {}
    sums, found = on_every_rank(
        transport,
        lambda: weighted_sums(states, reshard_rules(options)),
        StateError,
        doing=USING,
        say=lambda sums: {"chosen": chosen, "keys": sorted(sums.sums), "gone": sums.gone},
    )
    means = {
        key: reduced(transport, sums.sums.get(key), Key.parse(key).n)
        for key in sorted({key for document in found for key in document["keys"]})
    }
    if transport.rank == 0:
        gone = sorted({what for document in found for what in document["gone"]})
        anew = f"; the compressors' arrays {', '.join(gone)} start from scratch" if gone else ""
        _LOG.warning("a state is resharded %s: the mean residual is conserved%s", why, anew)
    store = StateStore({key: mean for key, mean in means.items() if mean.any()})
    sync_state = _sync_state(store, {}, found[head.brought_by]["chosen"])
    return Loaded(head.step, head.seed, sync_state, resharded=True)
