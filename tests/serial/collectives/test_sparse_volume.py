"""What a rank sends of sparse payloads, by the number of ranks: the table in docs/routes.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from espresso_mpi.collectives.data.layout import Dense, Topology
from espresso_mpi.collectives.ops.base import operations
from espresso_mpi.collectives.program import MoveStep, compile_route
from espresso_mpi.compressors import get
from espresso_mpi.types import Route

N = 1 << 20
PAGE = (Path(__file__).parents[3] / "docs" / "routes.md").read_text()


def sent(route, spec, ranks):
    """Bytes that each rank sends, every rank on a node of its own."""
    topology, whole = Topology(tuple((rank,) for rank in range(ranks))), Dense(0, N)
    programs = (compile_route(Route.parse(route), topology, whole, "float32", r, get(spec)) for r in range(ranks))
    return [sum(operations()[s.op].sent(s.move) for s in steps if isinstance(s, MoveStep)) for steps in programs]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "topk:ratio=0.01,values=int4"])
def test_dealing_out_is_bounded_and_even(spec, ranks):
    """Below four payloads of k elements however many ranks there are, and as much from every rank."""
    payload, dealt = get(spec).nbytes(N), sent("flat-alltoall", spec, ranks)
    assert len(set(dealt)) == 1
    share = 2 * (ranks - 1) / ranks * payload
    assert share * 0.99 <= dealt[0] <= share * 1.05
    assert sent("flat-allgather", spec, ranks) == [(ranks - 1) * -(-payload // 16) * 16] * ranks
    row = re.search(rf"^\| {ranks} \|(.*)\|$", PAGE[PAGE.index("## Sparse payloads") :], re.MULTILINE)
    cells = [float(cell) for cell in row[1].split("|")[:4]]
    words = [each / (4 * get(spec).count(N)) for each in (sent("flat-allgather", spec, ranks)[0], dealt[0])]
    assert cells[2 * ("int4" in spec) :][:2] == pytest.approx(words, abs=0.01)
