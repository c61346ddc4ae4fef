"""A short run of ``bench collectives``: all are right, mistakes are counted, bytes are those of the payloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espresso_mpi.bench import collectives
from espresso_mpi.bench.collective_cases import COLLECTIVES, Case, Elements
from espresso_mpi.bench.harness import memory
from espresso_mpi.compressors import get

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]


def test_every_collective_is_right_and_sends_what_its_payloads_take(world, tmp_path):
    path, n = Path(world.bcast(str(tmp_path))) / "collectives.json", 1 << 14
    rows = collectives.main(sizes="8B,64KiB", compressors="int8,onebit", repeats=3, json=path)
    dense = [(row.collective, row.nbytes == 8) for row in rows if row.method == "none"]
    assert {name for name, _ in dense} == set(COLLECTIVES) and dense.count(("allreduce", True)) == 1
    for row in rows:
        assert (row.wrong, row.mpi_wrong) == (0, 0), row
        assert row.ratio == row.seconds / row.mpi_seconds and row.best <= row.seconds
        assert row.wire_bytes == row.expected_bytes
    large = {row.method: row.wire_bytes for row in rows if row.collective == "allreduce" and row.nbytes == 4 * n}
    if world.size == 2:  # each sends its payload to the other
        assert large["onebit"] == 2 * get("onebit").nbytes(n)
    if world.rank == 0:
        assert len(json.loads(path.read_text())["rows"]) == len(rows)


INTEGERS = pytest.param("int8", "prod", marks=pytest.mark.thorough)  # to MPI an operator as any other


@pytest.mark.parametrize(("dtype", "op"), [("float16", "sum"), ("float64", "mean"), ("bool", "bxor"), INTEGERS])
def test_other_elements_and_operators(world, dtype, op):
    rows = collectives.main("allreduce,reduce,reduce_scatter,alltoallv", "1KiB", 2, dtype, op, out_of_place=True)
    assert [row.wrong for row in rows] == [0] * 4
    assert [row.in_place for row in rows] == [False] * 4


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "barrier"])
def test_a_wrong_element_is_counted(world, name):
    case = Case(world, name, 40000, Elements("int32", "sum"), out_of_place=True)

    def run():
        case.by_mpi()
        case.result[:1] += world.rank == 0

    assert case.wrong(run) == 1
    case.close()


def test_sizes_beyond_the_memory_of_a_node_are_left_out_on_all_ranks(world, monkeypatch, capfd):
    """One rank finds little memory; what all ranks of the node take together counts."""
    each, least = 4 * 65536, 4 * world.size
    free = world.size * each * (1 if world.rank == 0 else 4) // 2
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    rows = collectives.main("allgather", "16KiB,64KiB", compressors="none", repeats=1)
    assert [row.nbytes for row in rows] == [(1 << 14) // least * least]
    assert ("64 KiB is left out" in capfd.readouterr().out) == (world.rank == 0)
    assert memory.lack(world, each // 4) == "" and memory.lack(world, each)
    monkeypatch.undo()
    assert 0 < memory.free_bytes() < 1 << 50
