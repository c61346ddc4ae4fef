"""``gpu-check``: that a wrong kernel is found, in numba's simulator, and what the results say of a result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from espresso_mpi.bench.gpu import pictures
from espresso_mpi.bench.gpu.report import markdown
from espresso_mpi.bench.gpu.suite import promise_results

TESTS = Path(__file__).parents[3]
COMPARES = """
import cuda_simulator
cuda_simulator.install()
from espresso_mpi.bench.gpu import kernels
from espresso_mpi.compressors.kernels.cuda import casts
specs, sizes = ("fp16", "int8", "topk:ratio=0.3"), (0, 1, 300)
assert kernels.compare(specs, sizes) == []
right = casts.encode

def wrong(x, residual, payload, *rest):
    count = right(x, residual, payload, *rest)
    payload.copy_to_device(payload.copy_to_host() ^ 1)
    return count

casts.encode = wrong
print(kernels.compare(specs, sizes)[0])
"""


@pytest.mark.timeout(300)
def test_a_kernel_that_writes_other_bytes_is_found():
    done = subprocess.run([sys.executable, "-c", COMPARES], cwd=TESTS, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Difference(method='fp16', n=1, what='payload of step 0', elements=2)"


def result(**changes):
    row = {"method": "int8", "n": 10**8, "encode_best_s": 1e-3, "decode_best_s": 1e-3, "launch_s": 1e-4}
    overlap = {"method": "int8", "backward_s": 0.1, "sync_s": 0.05, "one_by_one_s": 0.15, "pushed_s": 0.11}
    good = {
        "environment": {"versions": {"numba": "0.68.1"}},
        "gpus": [{"name": "a GPU"}],
        "kernels": {"methods": 84, "sizes": [0, 1], "large_methods": ["int8"], "differences": []},
        "speeds": [{**row, "encode_bound_fraction": 0.9, "decode_bound_fraction": 0.8}],
        "pointers": {"works": False, "why": "signal 11"},
        "ranks": {
            "routes": {"runs": 42, "wrong": []}, "sessions": 0, "side_stream": 0, "synchronises": 0,
            "overlap": [{**overlap, "hidden": 0.8}],
            "sizes": [{"method": "int8", "nbytes": 4096, "gpu_s": 1e-3, "host_s": 1e-4}],
        },
        "sanitizer": "compute-sanitizer is not installed",
    }  # fmt: skip
    return {**good, **changes}


def broken(found):
    return [one.promise for one in promise_results(found) if one.kept is False]


def test_each_promise_that_is_not_kept_is_named():
    good = result()
    assert broken(good) == []
    ranks, speed = good["ranks"], good["speeds"][0]
    assert broken(result(kernels={**good["kernels"], "differences": [{}]})) == ["kernels write the bytes of the CPU's"]
    assert len(broken(result(speeds=[{**speed, "decode_bound_fraction": 0.69}]))) == 1
    for part in ("sessions", "side_stream", "synchronises"):
        assert len(broken(result(ranks={**ranks, part: 1}))) == 1, part
    assert len(broken(result(ranks={**ranks, "routes": {"runs": 42, "wrong": ["flat"]}}))) == 1
    assert broken(result(ranks={**ranks, "overlap": [{**ranks["overlap"][0], "hidden": 0.7}]})) == [
        "share that push hides: int8"
    ]
    assert broken(result(ranks="the job ended with 1")) == ["ranks on GPUs"]


def test_what_the_sanitizer_found_is_in_the_report():
    said = "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error\n"
    bad = result(sanitizer={"status": 9, "said": said, "methods": "fp16"})
    (one,) = (one for one in promise_results(bad) if one.kept is False)
    assert one.found == "exit status 9: ERROR SUMMARY: 1 error"
    assert "Invalid __global__ read" in markdown({**bad, "rows": []})


def test_the_picture_has_a_bar_for_each_method_and_its_goal(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    bars, barh = [], Axes.barh
    monkeypatch.setattr(
        Axes, "barh", lambda axes, y, width, **given: bars.append(width) or barh(axes, y, width, **given)
    )
    good = result()
    row = good["speeds"][0]
    pictures.draw(result(speeds=[{**row, "method": "copy", "encode_bound_fraction": 1.0}, row]), tmp_path / "gpu.png")
    assert bars == [[0.9], [0.8]] and (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"
    assert (pictures._goal("int8"), pictures._goal("topk")) == (0.7, 0.4)


def test_what_delays_what_is_in_the_report():
    times = {"encode_s": 0.01, "encode_beside_s": 0.02, "product_s": 0.04, "product_beside_s": 0.05, "overlapped": 0.5}
    both = result(beside=[{"method": "int8", **times}])
    assert "2.00 and 1.25 times as long as alone" in [one.found for one in promise_results(both)]
    assert "| int8 | 10.00 | 20.00 | 40.00 | 50.00 | 0.50 |" in markdown({**both, "rows": []})


def test_the_report_has_all_parts():
    good = result()
    text = markdown({**good, "rows": [vars(one) for one in promise_results(good)]})
    for words in ("a GPU; numba 0.68.1", "| yes |", "| int8 | 400 | 0.90 | 400 | 0.80 | 100 |", "| 0.80 |", "| 4096 |"):
        assert words in text
