"""The fits and plots of ``bench scaling``, shapes of ResNet-101, the arithmetic of ``bench overlap``, the report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from espresso_mpi.bench import overlap, report, scaling, sync, sync_tables, tensors
from espresso_mpi.bench.harness.rows import bandwidths
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.output import write_rows

SIZES = [4 << (2 * i) << 10 for i in range(9)]


def points(alpha, beta, ranks=4, method="none", noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    seconds = [(alpha + beta * n) * (1 + noise * rng.standard_normal()) for n in SIZES]
    return [scaling.Row(method=method, ranks=ranks, nbytes=n, seconds=t, repeats=3) for n, t in zip(SIZES, seconds)]


# --- fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha, beta", [(1e-4, 1e-9), (5e-6, 8e-9), (0.0, 1e-8)])
def test_an_exact_line_is_found(alpha, beta):
    rows = points(alpha, beta)
    found = scaling.fit([row.nbytes for row in rows], [row.seconds for row in rows])
    assert found[0] == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found[1] == pytest.approx(beta, rel=1e-6)
    assert found[2] == pytest.approx(0, abs=1e-9)


def test_noise_is_reported_and_hardly_moves_the_line():
    """Relative weights: 5 % noise on every point leaves both parameters within 15 %, though sizes span 65536."""
    rows = points(2e-4, 8e-9, noise=0.05)
    alpha, beta, deviation = scaling.fit([row.nbytes for row in rows], [row.seconds for row in rows])
    assert alpha == pytest.approx(2e-4, rel=0.15)
    assert beta == pytest.approx(8e-9, rel=0.15)
    assert 0.01 < deviation < 0.15


def test_a_line_for_each_method_and_number_of_ranks():
    rows = points(1e-4, 1e-9) + points(2e-4, 2e-9, ranks=2) + points(3e-4, 3e-9, method="int8")
    found = {(line.method, line.ranks): line.alpha for line in scaling.fits(rows)}
    expected = {("none", 4): 1e-4, ("none", 2): 2e-4, ("int8", 4): 3e-4}
    assert found == pytest.approx(expected)


def test_one_size_has_no_line():
    assert scaling.fits(points(1e-4, 1e-9)[:1]) == []


def test_numbers_of_ranks():
    assert scaling._counts(None, 8) == [2, 4, 8]
    assert scaling._counts(None, 6) == [2, 4, 6]
    assert scaling._counts("3,2", 4) == [2, 3]
    for text in ("1", "5", "2,x", "2,2", ""):
        with pytest.raises(ConfigError, match="--ranks"):
            scaling._counts(text, 4)
    with pytest.raises(ConfigError, match="nobody to send to"):
        scaling._counts(None, 1)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = points(1e-4, 1e-9) + points(2e-4, 2e-9, ranks=2)[:5] + points(3e-4, 3e-9, method="int8")
    scaling.draw(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert scaling._common_size(rows) == SIZES[4]


# --- ResNet-101 -------------------------------------------------------------------------------------------------------


def test_resnet101_has_the_published_parameters():
    shapes = tensors.resnet101()
    assert len(shapes) == 314
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 44_549_160
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    assert len(convolutions) == 3 * (3 + 4 + 23 + 3) + 4 + 1
    assert max(shapes.values(), key=np.prod) == (512, 512, 3, 3)


def test_gradients_come_last_layer_first():
    names = list(tensors.resnet101())
    assert names[:2] == ["fc.bias", "fc.weight"]
    assert names[-1] == "conv1.weight"


def test_other_sizes_can_be_asked_for():
    assert tensors.shapes_of("4KiB,64KiB") == {"tensor0": (1024,), "tensor1": (16384,)}


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_the_step_is_compared_with_what_it_may_take():
    times = np.array([[0.10, 0.08, 0.02, 0.12]] * 3)
    row = overlap.row("none", {"w": np.zeros(10, np.float32)}, times, 0)
    assert row.allowed == pytest.approx(1.15 * 0.10 + 0.02)
    assert row.ratio == pytest.approx(0.12 / 0.135)
    assert row.hidden == pytest.approx(0.75)
    assert (row.tensors, row.nbytes, row.repeats) == (1, 40, 3)


class Counted:
    """Matrices that only count."""

    def __init__(self):
        self.done = []

    def multiply(self, times):
        self.done.append(times)


def test_computing_is_shared_out_evenly_and_adds_up():
    """250 products are 62 or 63 before each of four tensors."""
    matrices = Counted()
    work = overlap._Compute(matrices, 250, "abcd")
    assert list(work.between()) == ["a", "b", "c", "d"]
    assert sum(matrices.done) == 250
    assert set(matrices.done) <= {62, 63}


# --- the report -------------------------------------------------------------------------------------------------------


def sync_row(method, seconds, **more):
    return sync_tables.Row(
        method=method, route="", nbytes=1 << 20, seconds=seconds, p99=seconds, wrong=0, repeats=3, **more
    )


@pytest.fixture
def results(tmp_path):
    """One JSON file of each kind."""
    rows = [sync_row("mpi-allreduce-fp32", 1.0), sync_row("mpi-allreduce-fp16", 2.0)]
    rows += [sync_row("none", 0.5, wire_seconds=0.2, memory_seconds=0.4, bound_seconds=0.4, ratio=1.25)]
    rows += [sync_row("int8", 1.5)]
    rates = {str(1 << 20): {"link": 125e6, "copy": [3e10]}}
    write_rows(tmp_path / "sync.json", rows, kind="sync", yardsticks=rates)
    each = [
        tensors.Row(method=m, tensors=314, nbytes=100, seconds=s, p99=s, wrong=0, repeats=3)
        for m, s in [(tensors.FUSED, 1.0), (tensors.EACH, 4.0)]
    ]
    write_rows(tmp_path / "tensors.json", each, kind="tensors", network="ResNet-101")
    step = overlap.row("none", {"w": np.zeros(10, np.float32)}, np.array([[0.1, 0.08, 0.02, 0.12]]), 0)
    write_rows(tmp_path / "overlap.json", [step], kind="overlap", network="ResNet-101")
    write_rows(tmp_path / "scaling.json", points(1e-4, 1e-9), kind="scaling", picture="docs/scaling.png")
    return [tmp_path / f"{name}.json" for name in ("sync", "tensors", "overlap", "scaling")]


def test_every_kind_has_its_section(results, tmp_path):
    report.main(results=results, output=tmp_path / "B.md")
    text = (tmp_path / "B.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [h.split(":")[0] for h in headings] == [
        "## Where compression loses", "## What the columns mean", "## Synchronisation",
        "## The gradients of ResNet-101", "## Overlap with computing", "## How cost grows",
    ]  # fmt: skip
    assert "200.00 | 400.00 | 400.00 | 1.25" in text
    assert "125.0 MB/s" in text
    assert "![Time against size and against ranks](docs/scaling.png)" in text


def test_losses_are_those_of_the_rows(tmp_path):
    """Against the quickest of each kind of baseline, MPI's tuned rows and our fp16 among them."""
    seconds = {"mpi-allreduce-fp32": 1.0, "mpi-allreduce-fp32-tuned": 0.8, "mpi-allreduce-fp16": 0.5,
               "mpi-allreduce-fp16-tuned": 0.6, "none": 0.9, "fp16": 0.4, "int8": 0.6, "onebit": 1.6}  # fmt: skip
    rows = [sync_row(m, s, cpu=2.5e-9, kernels=1e-9) for m, s in seconds.items()]
    write_rows(tmp_path / "sync.json", rows, kind="sync")
    report.main(results=[tmp_path / "sync.json"], output=tmp_path / "B.md")
    losses = [line for line in (tmp_path / "B.md").read_text().splitlines() if line.startswith("- ")]
    assert losses[0].endswith("against fp32: 1 MiB: none (1.12 times), onebit (2.00 times).")
    assert losses[1].endswith("against fp16: 1 MiB: int8 (1.50 times), onebit (4.00 times).")
    line = "| onebit | 1600.00 | 1600.00 | 0.001 | 0.000 | 2.50 | 40% | 0.50 | 0.31 | 0.25 |"
    assert line in (tmp_path / "B.md").read_text()


def test_bandwidths_are_those_of_nccl_tests(results, tmp_path):
    """1 MiB in 1 s over 4 ranks: each must send 2 · 3/4 of it; also of results that were written without."""
    assert bandwidths(1 << 20, 0.5, 4) == {"algbw": 2 << 20, "busbw": 3 << 20}
    assert bandwidths(1 << 20, 0.5, 1)["busbw"] == 0
    old = json.loads(results[0].read_text())
    old["environment"]["job"] = {"ranks": 4}
    old["rows"] = [{k: v for k, v in row.items() if k not in ("algbw", "busbw")} for row in old["rows"]]
    old["rows"] = [{**row, "nbytes": 1 << 30} for row in old["rows"]]
    results[0].write_text(json.dumps(old))
    report.main(results=results[:1], output=tmp_path / "B.md")
    assert "| 1024 MiB | none | 500.00 | 500.00 | 2.147 | 3.221 |" in (tmp_path / "B.md").read_text()


def test_of_several_ways_under_one_name_the_quickest_is_kept():
    rows = [sync_row("a", 2.0), sync_row("b", 2.0), sync_row("b", 1.0), sync_row("b", 3.0)]
    assert sync._quickest_of_each(rows) == [rows[0], rows[2]]


def test_another_mpi_library_stands_beside(results, tmp_path):
    """Its rows are in the table of the same place, named after it, and no baseline of the others."""
    write_rows(tmp_path / "other.json", [sync_row("mpi-allreduce-fp32", 0.25)], kind="sync")
    other = json.loads((tmp_path / "other.json").read_text())
    other["environment"]["mpi"] = {"library": "MPICH", "version": "5.0.2"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    report.main(results=[results[0], tmp_path / "other.json"], output=tmp_path / "B.md")
    text = (tmp_path / "B.md").read_text()
    assert text.count("## Synchronisation") == 1
    assert "| mpi-allreduce-fp32 (MPICH 5.0.2) | 250.00 |" in text
    assert "against fp32: 1 MiB: int8 (3.00 times)." in text
    assert "MPICH 5.0.2, in a run of its own: 1 MiB: none (2.00 times), int8 (6.00 times)." in text


def test_a_result_of_an_unknown_kind_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"environment": {}, "rows": [], "kind": "dream"}))
    with pytest.raises(ConfigError, match="dream"):
        report.main(results=[path], output=tmp_path / "B.md")
