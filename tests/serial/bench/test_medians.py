"""Several runs of a benchmark are one table, of the rows with the median times; other results stay as they are."""

from espresso_mpi.bench.medians import of_runs


def run(place, kind="sync", lines=None, **seconds):
    time = "step" if kind == "overlap" else "seconds"
    rows = [{"method": name, "nbytes": 4096, time: s, "cpu": 10 * s} for name, s in seconds.items()]
    return {"kind": kind, "place": place, "rows": rows, "cache_line_ns": lines}


def test_each_row_is_that_of_the_median_run():
    three = [run("here", "sync", (a, None), none=a, int8=b) for a, b in ((3.0, 7.0), (1.0, 9.0), (2.0, 8.0))]
    elsewhere, other, two = run("there", none=5.0, int8=5.0), run("here", none=5.0), run("here", "overlap", none=4.0)
    faster = run("here", "overlap", none=3.0)
    found = of_runs([three[0], elsewhere, *three[1:], other, two, faster], lambda result: result["place"])
    assert [(one["kind"], one["place"], len(one["rows"]), one.get("runs")) for one in found] == [
        ("sync", "here", 2, 3), ("sync", "there", 2, None), ("sync", "here", 1, None), ("overlap", "here", 1, 2)
    ]  # fmt: skip
    assert [(row["seconds"], row["cpu"]) for row in found[0]["rows"]] == [(2.0, 20.0), (8.0, 80.0)]
    assert found[0]["cache_line_ns"] == [3.0, 1.0, 2.0]
    assert found[1] is elsewhere
    assert found[3]["rows"][0]["step"] == 4.0


def test_results_of_other_benchmarks_are_never_one():
    one = {"kind": "validate", "place": "here", "rows": [{"method": "none", "nbytes": 1, "seconds": 1.0}]}
    assert of_runs([one, one], lambda result: result["place"]) == [one, one]
