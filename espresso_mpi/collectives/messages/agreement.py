"""Small allgathers: a few bytes or JSON values of each rank, and errors that all ranks must raise.

``on_rank_0`` and ``on_every_rank`` run what may fail; if it fails on one rank, all ranks raise the same error.

Inside a node, data pass through slots of the shared window. Between nodes, one rank of each node, the leader, exchanges
the data of its node with the other leaders, and passes the result on (``leader_gather``); each sends ceil(log2 nodes)
messages. If a node has no window, all ranks exchange messages like leaders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from espresso_mpi.errors import EspressoError

from .leader_gather import gather_for
from .transport import Transport
from .window_places import SLOT

_ALIGN = 64

T = TypeVar("T")


class Failure(NamedTuple):
    """A failure on a rank. ``who``: the text for the rank, empty if only a communicator is known."""

    who: str
    kind: str
    text: str


Wording = Callable[[Sequence[Failure | None]], str]
"""Makes one text of the failures of all ranks, in rank order; None: no failure."""


def all_failures(failures: Sequence[Failure | None]) -> str:
    """All texts, each after the ranks that it comes from."""
    by_text: dict[str, list[str]] = {}
    for failure in failures:
        if failure is not None:
            by_text.setdefault(failure.text, []).append(failure.who)
    everyone = len(failures) > 1 and [len(who) for who in by_text.values()] == [len(failures)]
    return "; ".join(f"{'all ranks' if everyone else ', '.join(who)}: {text}" for text, who in by_text.items())


def first_failure(failures: Sequence[Failure | None]) -> str:
    """The text of the first rank that failed, after the text for the rank, if it is known."""
    failure = next(failure for failure in failures if failure is not None)
    return f"{failure.who}: {failure.text}" if failure.who else failure.text


def on_every_rank(
    ranks: Any,
    act: Callable[[], T],
    kind: type[EspressoError] | None = None,
    *,
    doing: str = "",
    say: Callable[[T], Any] = lambda value: None,
    wording: Wording = all_failures,
) -> tuple[T, list[Any]]:
    """Run a function on every rank; a failure on any rank is an error on all. Collective.

    Args:
        ranks: a Transport, or a communicator of mpi4py.
        act: the function; it must not wait for another rank.
        kind: type of the error; None: as it was raised.
        doing: begins the text of errors that are not this package's own.
        say: returns what the other ranks get of the result, a JSON value.
        wording: makes one text of the failures.

    Returns:
        The result of ``act`` on this rank, and what ``say`` returned on all ranks, in rank order.

    Raises:
        kind: the same on every rank, if ``act`` raised anything on one; RankTimeoutError: a rank did not come.
    """
    value, mine, problem = _attempted(act, say)
    replies = _shared(ranks, [_encoded(problem, doing), mine])
    errors = [error for error, _ in replies]
    failures = [None if error is None else Failure(_name(ranks, rank), *error) for rank, error in enumerate(errors)]
    first = next((failure for failure in failures if failure is not None), None)
    if first is not None:
        raise (kind or _kind(first.kind))(wording(failures)) from problem
    return value, [reply for _, reply in replies]


def on_rank_0(ranks: Any, act: Callable[[], Any], kind: type[EspressoError] | None = None, *, doing: str = "") -> Any:
    """Run a function on rank 0 alone; its failure is an error on every rank. Collective.

    Args:
        ranks, kind, doing: as of ``on_every_rank``.
        act: returns a JSON value.

    Returns:
        What ``act`` returned, on every rank.

    Raises:
        kind: the same on every rank, if ``act`` raised anything; RankTimeoutError: a rank did not come.
    """
    value, problem = None, None
    if ranks.rank == 0:
        _, value, problem = _attempted(act, lambda value: value)
    error, value = _shared(ranks, [_encoded(problem, doing), value])[0]
    if error is not None:
        name, text = error
        raise (kind or _kind(name))(text) from problem
    return value


def floats(transport: Transport, *mine: float) -> np.ndarray:
    """Some numbers of every rank, float64 (ranks, numbers), the same on all ranks. Collective."""
    message = np.array(mine, np.float64).view(np.uint8)
    return np.array([row.view(np.float64) for row in gather_small(transport, message, message.size)])


def allgather_json(transport: Transport, text: bytes) -> list[Any]:
    """The JSON documents of all ranks in rank order, given this rank's as text."""
    sizes = gather_small(transport, np.array([len(text)], np.int64).view(np.uint8), 8)
    longest = max(int(size.view(np.int64)[0]) for size in sizes)
    return [json.loads(t.tobytes()) for t in gather_small(transport, np.frombuffer(text, np.uint8), longest)]


def gather_small(transport: Transport, mine: np.ndarray, room: int) -> list[np.ndarray]:
    """Everyone's bytes, in rank order; each array begins at a multiple of 16 bytes. Collective.

    Args:
        mine: flat uint8, at most ``room``; lengths may differ.
        room: the same on every rank; meant for some 10 KiB, for everything stays in memory at once.

    Raises:
        RankTimeoutError: a rank did not come; where nodes share memory, all ranks name the same one.
    """
    mine = mine if mine.flags.writeable and mine.flags.c_contiguous else mine.copy()  # kernels know one kind of array
    if len(transport.node) == transport.topology.size and transport.window_for(transport.node, mine) is not None:
        return _inside(transport, mine, room)
    return gather_for(transport, room).run(mine)


def fingerprint(value: Any) -> bytes:
    """SHA-256 of a JSON value's canonical text: equal values, equal bytes, on any node."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _attempted(act: Callable[[], Any], say: Callable[[Any], Any]) -> tuple[Any, Any, Exception | None]:
    """The result, what to send of it, and the error: this rank must communicate with the others in any case."""
    try:
        value = act()
        return value, say(value), None
    except Exception as error:  # the other ranks must get every error
        return None, None, error


def _encoded(problem: Exception | None, doing: str) -> tuple[str, str] | None:
    """The name of an error's type, and its text."""
    if problem is None:
        return None
    if isinstance(problem, EspressoError):
        return type(problem).__name__, str(problem)
    return "", f"{doing}{': ' if doing else ''}{type(problem).__name__}: {problem}"


def _shared(ranks: Any, value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    if hasattr(ranks, "allgather"):
        found: list[Any] = ranks.allgather(value)
        return found
    return allgather_json(ranks, json.dumps(value).encode())


def _name(ranks: Any, rank: int) -> str:
    return str(ranks.describe(rank)) if hasattr(ranks, "describe") else ""


def _kind(name: str, base: type[EspressoError] = EspressoError) -> type[EspressoError]:
    """The error of this package with a name; all ranks run the same program."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("espresso_mpi") and kind.__name__ == name:
            return kind
    return base


def _inside(transport: Transport, mine: np.ndarray, room: int) -> list[np.ndarray]:
    """Everyone's bytes in this node, in order of rank."""
    window, count = transport.window_for(transport.node, mine), len(transport.node)
    if window is None:  # the node's only rank
        return [mine]
    if room <= SLOT:
        width = -(-room // _ALIGN) * _ALIGN
        out, sizes = np.empty(count * width, np.uint8), np.empty(count, np.int64)
        window.gather(mine, out, sizes)
        return [out[r * width : r * width + size] for r, size in enumerate(sizes.tolist())]
    pieces = [_inside(transport, mine[first : first + SLOT], SLOT) for first in range(0, room, SLOT)]
    return [np.concatenate(of_rank) for of_rank in zip(*pieces)]
