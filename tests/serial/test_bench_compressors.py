"""``bench compressors``: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json

import numba
import numpy as np
import pytest

from espresso_mpi.bench import compressors as suite
from espresso_mpi.bench import report
from espresso_mpi.compressors import get, names
from espresso_mpi.errors import ConfigError

KEYS = {
    "method", "device", "n", "encode_s", "decode_s", "encode_bound_fraction", "decode_bound_fraction", "payload_bytes",
    "vnmse", "vnmse_expected",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    rows = suite.main(sizes="64KiB,1MiB", methods="fp16,int8,topk:ratio=0.05", repeats=2, json=path)
    return rows, json.loads(path.read_text())


def of(rows, method, n):
    return next(row for row in rows if row.method == method and row.n == n)


def test_every_method_and_size_has_a_row_with_the_documented_keys(result):
    rows, written = result
    assert [row["method"] for row in written["rows"]] == [row.method for row in rows]
    assert {(row.method, row.n) for row in rows} >= {
        (method, n) for method in ("copy", "fp16", "int8", "topk:ratio=0.05") for n in (1 << 14, 1 << 18)
    }
    assert all(set(row) >= KEYS for row in written["rows"])
    assert written["environment"]["cores"]


def test_fractions_are_of_the_time_that_the_traffic_would_take(result):
    """At the bandwidth of the copy, which reads and writes every element."""
    rows, _ = result
    for n in (1 << 14, 1 << 18):
        bandwidth = 8 * n / of(rows, "copy", n).encode_s
        for spec in ("int8", "topk:ratio=0.05"):
            row, method = of(rows, spec, n), get(spec)
            traffic = method.encode_traffic(n) - (0 if row.feedback else 8 * n)
            assert row.encode_bound_fraction == pytest.approx(traffic / bandwidth / row.encode_s)
            assert row.decode_bound_fraction == pytest.approx(method.decode_traffic(n) / bandwidth / row.decode_s)
            assert row.payload_bytes == method.nbytes(n)


def test_errors_are_measured_beside_what_analysis_expects(result):
    rows, _ = result
    for spec in ("fp16", "int8", "topk:ratio=0.05"):
        row = of(rows, spec, 1 << 18)
        assert row.vnmse == pytest.approx(row.vnmse_expected, rel=0.05)


def test_torch_stands_beside_ours_where_it_is_installed(result):
    pytest.importorskip("torch")
    rows, _ = result
    peers = {row.method for row in rows if row.method.startswith("torch")}
    assert peers == {"torch half", "torch bfloat16", "torch topk 1%", "torch qint8"}
    assert all(of(rows, peer, 1 << 18).encode_s > 0 for peer in peers)


def test_all_means_every_method_and_variants_their_examples_too():
    assert suite._specs("all") == list(names())
    found = suite._specs("variants")
    assert set(names()) < set(found)
    assert len(found) == len(set(found))
    assert suite._specs("none,int8:block=64") == ["int8:block=64"]


def test_the_number_of_threads_is_given_back():
    before = numba.get_num_threads()
    suite.main(sizes="4KiB", methods="fp16", repeats=1, threads="1")
    assert numba.get_num_threads() == before


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"device": "tpu"}, "cpu or cuda"),
        ({"threads": "0"}, "expected numbers"),
        ({"threads": "many"}, "expected numbers"),
        ({"threads": "9999"}, "expected numbers"),
        ({"methods": "gzip"}, "not known"),
        ({"sizes": "2B"}, "size"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        suite.main(**arguments)


def test_a_gpu_that_is_not_there_is_an_error():
    from numba import cuda

    if cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="no GPU"):
        suite.main(device="cuda", methods="fp16")


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        suite.main(methods="fp16", json=tmp_path / "nowhere" / "rows.json")


def test_the_report_has_a_line_for_every_row(result, tmp_path):
    rows, written = result
    source, target = tmp_path / "rows.json", tmp_path / "REPORT.md"
    source.write_text(json.dumps(written))
    report.main(results=[source], output=target)
    text = target.read_text()
    assert "## Compressors" in text
    assert sum(
        line.startswith(("| copy", "| fp16", "| int8", "| topk", "| torch")) for line in text.splitlines()
    ) == len(rows)


def test_gaussian_values_are_what_is_measured():
    """The expected errors are for normal values: the benchmark must not use others."""
    stage = suite._Stage("cpu", 1, 1 << 16)
    values = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    assert suite._error(stage, values, get("fp16")) == pytest.approx(4.3e-8, rel=0.05)
