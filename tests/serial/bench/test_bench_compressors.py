"""``bench compressors``: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json

import numba
import numpy as np
import pytest

from espresso_mpi.bench import compressor_tables, memory, report
from espresso_mpi.bench import compressors as suite
from espresso_mpi.compressors import get, names
from espresso_mpi.errors import ConfigError

KEYS = {
    "method", "device", "n", "encode_s", "decode_s", "encode_best_s", "decode_best_s", "encode_bound_fraction",
    "decode_bound_fraction", "payload_bytes", "vnmse", "vnmse_expected",
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


def test_fractions_are_of_the_time_that_the_traffic_would_take(monkeypatch):
    """At the best rate of the plain kernels, from best times; arrays that caches may hold have none."""
    monkeypatch.setattr(suite, "last_level_cache", lambda: 1 << 18)
    rows = suite.main(sizes="1MiB,64KiB", methods="int8,topk:ratio=0.05", repeats=3)
    n = 1 << 18
    plain = {"copy": 8, "read": 4, "update": 8, "accumulate": 12}
    rate = max(moved * n / of(rows, name, n).encode_best_s for name, moved in plain.items())
    assert max(of(rows, name, n).encode_bound_fraction for name in plain) == pytest.approx(1)
    for spec in ("int8", "topk:ratio=0.05"):
        row, method = of(rows, spec, n), get(spec)
        traffic = method.encode_traffic(n) - (0 if row.feedback else 8 * n)
        assert row.encode_bound_fraction == pytest.approx(traffic / rate / row.encode_best_s)
        assert row.decode_bound_fraction == pytest.approx(method.decode_traffic(n) / rate / row.decode_best_s)
        assert row.payload_bytes == method.nbytes(n)
        assert row.encode_best_s <= row.encode_s and row.decode_best_s <= row.decode_s
        cached = of(rows, spec, 1 << 14)
        assert cached.encode_bound_fraction is None and cached.decode_bound_fraction is None


def test_a_share_above_1_is_named_beside_what_the_yardstick_did():
    def row(method, median, best, share):
        times = {"encode_best_s": best, "decode_best_s": best}
        return compressor_tables.Row(method, "cpu", 1, 8, True, median, median, share, share, 32, None, None, **times)

    plain, method = row("read", 0.03, 0.02, 1.0), row("int8", 0.02, 0.02, 1.004)
    assert compressor_tables.above([plain, method]) == ""
    assert compressor_tables.above([plain, row("int8", 0.02, 0.02, 1.25)]) == (
        "Above 1 with 1 threads: int8 encode 1.25, int8 decode 1.25. "
        "The yardstick varied: read took 1.50 times its best in the median."
    )


def test_plain_kernels_touch_every_element():
    bits = np.arange(100_001, dtype=np.uint32)
    assert memory.read(bits) == bits.sum(dtype=np.uint64)
    x, y = np.arange(100_001, dtype=np.float32), np.full(100_001, 3, np.float32)
    memory.accumulate(x, y)
    memory.update(x)
    assert np.array_equal(x, np.arange(100_001, dtype=np.float32) - 3)


def test_the_largest_cache_counts(tmp_path):
    for number, size in enumerate(["32K", "1024K", "32768K"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert memory.last_level_cache(tmp_path) == 32 << 20


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
    assert text.count("\n### ") == 2
    names = ("copy", "read", "update", "accumulate", "fp16", "int8", "topk", "torch")
    assert sum(line.startswith(tuple(f"| {name}" for name in names)) for line in text.splitlines()) == len(rows)


def test_gaussian_values_are_what_is_measured():
    """The expected errors are for normal values: the benchmark must not use others."""
    setup = suite._Setup("cpu", 1, 1 << 16)
    values = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    assert suite._error(setup, values, get("fp16")) == pytest.approx(4.3e-8, rel=0.05)
