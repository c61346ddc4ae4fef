"""What goes wrong on one rank is one error on all: for what each rank does, and for what rank 0 does for all."""

from __future__ import annotations

import json
import threading

import pytest

from espresso_mpi.collectives.messages import agreement
from espresso_mpi.collectives.messages.agreement import first_failure, on_every_rank, on_rank_0
from espresso_mpi.errors import ConfigError, EspressoError, StateError

RANKS = 3


class Communicator:
    """One rank of several threads, as mpi4py shows it."""

    def __init__(self, rank, values, barrier):
        self.rank, self._values, self._barrier = rank, values, barrier

    def allgather(self, value):
        self._values[self.rank] = value
        self._barrier.wait(20)
        found = list(self._values)
        self._barrier.wait(20)
        return found


class Transport:
    """The same with messages of JSON, and names of ranks."""

    def __init__(self, *given):
        self.comm, self.rank = Communicator(*given), given[0]

    def describe(self, rank):
        return f"rank {rank} (host)"


@pytest.fixture(autouse=True)
def _json_between_threads(monkeypatch):
    """How the bytes travel is tested on ranks."""
    monkeypatch.setattr(
        agreement, "allgather_json", lambda ranks, text: [json.loads(one) for one in ranks.comm.allgather(text)]
    )


def on_ranks(kind, call):
    """``call(ranks)`` of all ranks at the same time: results or errors, in rank order."""
    values, barrier, found = [None] * RANKS, threading.Barrier(RANKS), [None] * RANKS

    def run(rank):
        try:
            found[rank] = call(kind(rank, values, barrier))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


def failing(on, error):
    """Something that some ranks cannot do; the others return their rank."""

    def act(rank):
        if rank in on:
            raise error
        return rank

    return act


def one_error(found):
    """The kind and the text that all ranks raised."""
    kinds = {(type(error), str(error)) for error in found}
    assert len(kinds) == 1, found
    return kinds.pop()


@pytest.mark.parametrize("ranks", [Transport, Communicator])
@pytest.mark.parametrize("way", ["every", "first"])
@pytest.mark.parametrize(
    "error, kind, raised",
    [
        (StateError("lost"), None, (StateError, "lost")),
        (StateError("lost"), ConfigError, (ConfigError, "lost")),
        (OSError("full"), None, (EspressoError, "writing: OSError: full")),
        (OSError("full"), StateError, (StateError, "writing: OSError: full")),
    ],
)
def test_what_one_rank_raises_is_raised_on_all(ranks, way, error, kind, raised):
    if way == "first":
        act = failing([0], error)
        found = on_ranks(ranks, lambda all: on_rank_0(all, lambda: act(all.rank), kind, doing="writing"))
        assert one_error(found) == raised
        assert found[0].__cause__ is error
        return
    act = failing([1], error)
    found = on_ranks(
        ranks, lambda all: on_every_rank(all, lambda: act(all.rank), kind, doing="writing", wording=first_failure)
    )
    who = "rank 1 (host): " if ranks is Transport else ""
    assert one_error(found) == (raised[0], who + raised[1])


@pytest.mark.parametrize(
    "on, text", [([0, 2], "rank 0 (host), rank 2 (host): lost"), (range(RANKS), "all ranks: lost")]
)
def test_all_ranks_that_fail_are_named(on, text):
    act = failing(on, StateError("lost"))
    found = on_ranks(Transport, lambda all: on_every_rank(all, lambda: act(all.rank)))
    assert one_error(found) == (StateError, text)


@pytest.mark.parametrize("ranks", [Transport, Communicator])
def test_what_comes_out_is_told_to_all(ranks):
    found = on_ranks(ranks, lambda all: on_every_rank(all, lambda: {all.rank}, say=lambda mine: [*mine, "said"]))
    assert found == [({rank}, [[0, "said"], [1, "said"], [2, "said"]]) for rank in range(RANKS)]
    assert on_ranks(ranks, lambda all: on_rank_0(all, lambda: [all.rank])) == [[0]] * RANKS
