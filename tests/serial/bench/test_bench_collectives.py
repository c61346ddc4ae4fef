"""Arguments of ``bench collectives``, its picture, and its section of the report."""

from __future__ import annotations

import pytest

from espresso_mpi.bench import collective_tables, collectives, report
from espresso_mpi.bench.harness.rows import bandwidths
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.output import write_rows


@pytest.mark.parametrize(
    "arguments",
    [{"collectives": "scatter"}, {"sizes": "1MiB-1KiB"}, {"dtype": "text"}, {"op": "median"},
     {"dtype": "int8", "compressors": "onebit"}],
)  # fmt: skip
def test_what_does_not_fit_is_refused_first(arguments):
    with pytest.raises(ConfigError, match="expected"):
        collectives.main(**arguments)


def test_sizes_are_a_range_or_a_list():
    assert collectives.lengths_of("8B-1KiB", 4) == [8, 32, 128, 512, 1024]
    assert collectives.lengths_of("8B-512B", 4) == [8, 32, 128, 512]
    assert collectives.lengths_of("1KiB,4KiB", 4) == [1024, 4096]
    assert collectives.lengths_of("64B-64B", 2) == [64]


def test_bus_bandwidths_are_those_of_nccl_tests():
    found = {name: bandwidths(1000, 1.0, 4, name)["busbw"] for name in ("allreduce", "broadcast", "alltoall")}
    assert found == {"allreduce": 1500, "broadcast": 1000, "alltoall": 750}


def test_the_report_and_the_picture_have_every_collective(tmp_path):
    rows = [
        collective_tables.Row(
            method=method, nbytes=n, seconds=1e-6 * n, p99=1e-6 * n, best=5e-7 * n, repeats=3, wrong=0,
            collective=name, dtype="int64", op="sum", mpi_seconds=2e-6 * n, mpi_best=1e-6 * n, ratio=0.5, mpi_wrong=0,
            wire_bytes=110 if method == "int8" else None, expected_bytes=100 if method == "int8" else None,
            **bandwidths(n, 1e-6 * n, 4, name),
        )
        for name, method in [("allreduce", "none"), ("allreduce", "int8"), ("alltoallv", "none")]
        for n in (8, 1 << 20)
    ]  # fmt: skip
    collective_tables.draw(rows, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    write_rows(tmp_path / "c.json", rows, kind="collectives", picture="docs/c.png")
    report.main(results=[tmp_path / "c.json"], output=tmp_path / "B.md")
    text = (tmp_path / "B.md").read_text()
    assert "## Collectives: " in text and "Reductions: int64 sum." in text and "](docs/c.png)" in text
    assert "| alltoallv | 8 B | none | 8.0 | 8.0 | 16.0 | 0.50 | 0.50 |" in text
    assert "| 110 | 10 |" in text
