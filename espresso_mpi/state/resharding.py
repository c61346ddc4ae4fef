"""Resharding state to other ranks, nodes, routes or segments: the arrays of regions and ranks become their mean.

The mean is one array for the whole tensor. Every rank gets it, and splits it into its own regions when it synchronises
the tensor next. docs/state.md has the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .. import compressors
from ..collectives.messages.transport import Transport
from ..collectives.store_keys import BY_NODES, OF_RANK, OWN, WHOLE, Key
from ..errors import StateError
from ..options import Options
from .snapshots import StateDict
from .store import Weights


@dataclass
class Sums:
    """Float64 sums over some ranks, by the key after resharding; ``gone``: compressors' arrays that are dropped."""

    sums: dict[str, np.ndarray] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    def add(self, key: Key, weight: float, value: np.ndarray) -> None:
        """``sum[region] += weight · value``."""
        whole = str(Key(key.name, key.n, WHOLE, 0, key.n, key.what))
        if whole not in self.sums:
            self.sums[whole] = np.zeros(key.n)
        self.sums[whole][key.start : key.stop] += weight * value.astype(np.float64)


def weighted_sums(states: Iterable[StateDict], rules: Mapping[str, str]) -> Sums:
    """The weighted sums of the state of some former ranks; ``rules``: see ``reshard_rules``."""
    found = Sums()
    for state in states:
        weights, ranks = Weights(state["weights"]), sum(map(len, state["nodes"]))
        for text, value in state["arrays"].items():
            key = Key.parse(text)
            if key.name.endswith(BY_NODES):
                raise StateError(
                    f"{str(key)!r} cannot be resharded to other ranks, nodes, routes or segments: its parts lie in the "
                    f"order of the former nodes; load it where it was saved, or use route='flat-alltoall'"
                )
            if key.name.endswith(OF_RANK):
                raise StateError(
                    f"{str(key)!r} cannot be resharded to other ranks, nodes, routes or segments: every rank has sent "
                    f"something else; load it where it was saved"
                )
            if key.point == WHOLE:
                found.add(key, 1 / ranks, value)  # still pending: every rank has the whole array
                continue
            what = _resharded_as(key, value, rules)
            if what is not None:
                found.add(Key(key.name, key.n, WHOLE, key.start, key.stop, what), weights.of(key), value)
            elif key.what.startswith(OWN):
                found.gone.append(key.what[len(OWN) :])
    found.gone = sorted(set(found.gone))
    return found


def _resharded_as(key: Key, value: np.ndarray, rules: Mapping[str, str]) -> str | None:
    """The kind of an array after resharding; None if it is dropped."""
    if not key.what.startswith(OWN):
        return {"sent": f"sent.{key.point}", "mean": None}.get(key.what, key.what)
    rule = rules.get(key.what[len(OWN) :])
    if rule is None:
        raise StateError(
            f"{str(key)!r} cannot be resharded to other ranks, nodes, routes or segments: its compressor "
            f"does not say how; name it in the compressor's ``keeps``, or load it where it was saved"
        )
    if rule == "forget" or key.point != "0":
        return None
    if value.size != key.size:
        raise StateError(
            f"{str(key)!r} has {value.size} elements for a region of {key.size}, so it cannot be averaged as its "
            f"compressor's ``keeps`` says; make that 'forget', or load it where it was saved"
        )
    return key.what


def reshard_rules(options: Options) -> dict[str, str]:
    """How the arrays of the session's compressors are resharded, by name: ``average`` or ``forget``.

    Raises:
        StateError: two compressors of a plan keep different things under one name.
    """
    rules: dict[str, str] = {}
    plan = options.plan
    named = [*plan.strategies.values(), plan.default] if plan else []
    specs = {s.compressor for s in named if s is not None} if plan else {options.compressor}
    for spec in sorted(specs - {"none"}):
        for what, rule in compressors.get(spec).keeps.items():
            if rules.setdefault(what, rule) != rule:
                raise StateError(
                    f"compressors of the plan disagree about how {what!r} is resharded; load it where it was saved"
                )
    return rules


def reduced(transport: Transport, mine: np.ndarray | None, n: int) -> np.ndarray:
    """The sum over the ranks as float32, shape (n,). Each piece is summed once, in rank order, and copied."""
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
