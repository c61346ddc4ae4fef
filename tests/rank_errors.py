"""Errors on several ranks: which rank makes them, and what all ranks hear of them."""

from __future__ import annotations

import pytest
from mpi4py import MPI

several = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")


def last(world):
    return world.rank == world.size - 1


def raised(act):
    """What ``act`` raises, or None: a test goes on with the other ranks in any case."""
    try:
        act()
    except Exception as error:
        return error
    return None


def same_error(world, kind, act):
    """Run ``act`` on every rank; all must raise ``kind`` with one and the same text, which is returned."""
    error = raised(act)
    assert all(world.allgather(type(error) is kind)), f"expected {kind.__name__}, got {error!r}"
    texts = set(world.allgather(str(error)))
    assert len(texts) == 1, texts
    return texts.pop()
