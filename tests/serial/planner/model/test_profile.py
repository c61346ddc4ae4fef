"""Curves, their fits, and profiles on disk."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.curve import ZERO, Curve, Sample
from espresso_mpi.planner.model.fingerprints import difference
from espresso_mpi.planner.model.profile import Profile

SIZES = [4 << (2 * i) << 10 for i in range(9)]
FEW = settings(max_examples=40, deadline=None)

seconds = st.floats(1e-7, 1e2)
sizes = st.integers(0, 1 << 36)


def samples(function, sizes=SIZES, spread=0.0, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [Sample(n, float(function(n)) * (1 + noise * rng.standard_normal()), spread, 5) for n in sizes]


@st.composite
def curves(draw):
    knots = sorted(draw(st.sets(sizes, min_size=1, max_size=6)))
    return Curve(tuple(knots), tuple(sorted(draw(st.lists(seconds, min_size=len(knots), max_size=len(knots))))))


@st.composite
def measurements(draw):
    where = draw(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=8))
    spread = draw(st.floats(0, 0.5))
    return [Sample(n, draw(seconds), spread, 3) for n in where]


# --- values -----------------------------------------------------------------------------------------------------------


def test_between_above_and_below_the_knots():
    curve = Curve((10, 20, 40), (3, 4, 10))
    assert [curve(size) for size in (10, 15, 20, 30, 40)] == [3, 3.5, 4, 7, 10]
    assert curve(50) == 13  # the last piece goes on
    assert curve(0) == 2  # the first one too: size 0 costs the start-up
    assert Curve((10, 20), (0.5, 2))(0) == 0  # but never less than nothing
    assert Curve((10,), (3,))(0) == Curve((10,), (3,))(1000) == 3
    assert ZERO(1 << 40) == 0


@given(st.floats(0, 1), st.floats(0, 1e-3), sizes)
def test_a_line_is_exact(alpha, beta, size):
    line = Curve.line(alpha, beta)
    assert line(0) == alpha
    assert line(size) == pytest.approx(alpha + beta * size, rel=4e-16 * 4, abs=0)


@given(curves(), st.lists(sizes, max_size=20))
def test_many_sizes_at_once_are_the_same_bits(curve, where):
    many = curve.many(np.array(where, np.int64).reshape(1, -1))
    assert many.shape == (1, len(where)) and many.dtype == np.float64
    assert many[0].tolist() == [curve(size) for size in where]


@given(curves(), sizes, sizes)
def test_a_curve_never_falls_and_agrees_with_numpy(curve, a, b):
    # Rounding may turn equal values by one unit in the last place.
    assert curve(min(a, b)) <= curve(max(a, b)) * (1 + 1e-14)
    assert curve(a) >= 0
    if curve.knots[0] <= a <= curve.knots[-1]:
        assert curve(a) == pytest.approx(np.interp(a, curve.knots, curve.values), rel=1e-9)


@pytest.mark.parametrize(
    "knots, values, says",
    [
        ((), (), "0 knots"),
        ((1, 2), (1,), "2 knots and 1 values"),
        ((2, 1), (1, 2), "sizes that rise"),
        ((1, 1), (1, 2), "sizes that rise"),
        ((1, 2), (2, 1), "never fall"),
        ((1, 2), (-1, 1), "of at least 0"),
        ((-1, 2), (0, 1), "of at least 0"),
        ((1, 2), (0, float("nan")), "finite"),
        ((1, float("inf")), (0, 1), "finite"),
        ((1, "2"), (0, 1), "'2'"),
    ],
)
def test_what_is_no_curve(knots, values, says):
    with pytest.raises(ConfigError, match=says):
        Curve(knots, values)


@pytest.mark.parametrize("alpha, beta", [(-1, 0), (0, -1), (float("nan"), 0), (0, float("inf"))])
def test_what_is_no_line(alpha, beta):
    with pytest.raises(ConfigError):
        Curve.line(alpha, beta)


@pytest.mark.parametrize(
    "row, says",
    [
        ((-1, 1.0, 0.0, 1), "size"),
        ((1.5, 1.0, 0.0, 1), "size"),
        ((1, 0.0, 0.0, 1), "time several calls together"),
        ((1, -1.0, 0.0, 1), "seconds"),
        ((1, float("nan"), 0.0, 1), "seconds"),
        ((1, 1.0, -0.1, 1), "spread"),
        ((1, 1.0, 0.0, 0), "repeats"),
        ((True, 1.0, 0.0, 1), "size"),
    ],
)
def test_what_is_no_sample(row, says):
    with pytest.raises(ConfigError, match=says):
        Sample(*row)


def test_numpys_numbers_become_pythons():
    sample = Sample(np.int64(4), np.float64(0.5), np.float32(0.25), np.int32(3))
    assert sample == Sample(4, 0.5, 0.25, 3)
    assert [type(value) for value in (sample.size, sample.seconds, sample.spread)] == [int, float, float]
    assert pickle.loads(pickle.dumps(sample)) == sample


# --- fits -------------------------------------------------------------------------------------------------------------


@FEW
@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_a_line_is_found_with_two_knots(alpha, beta):
    found = Curve.fit(samples(lambda n: alpha + beta * n))
    assert len(found.knots) == 2
    assert found.residual < 1e-12
    for size in (0, 100, 12345, SIZES[-1] * 10):
        assert found(size) == pytest.approx(alpha + beta * size, rel=1e-6)


@FEW
@given(st.sets(st.sampled_from(SIZES[1:-1]), min_size=1, max_size=3), st.data())
def test_true_pieces_are_found(kinks, data):
    """Pieces that begin at measured sizes, with values that at least double from one to the next."""
    knots = [SIZES[0], *sorted(kinks), SIZES[-1]]
    factors = data.draw(st.lists(st.floats(1.0, 400.0), min_size=len(knots) - 1, max_size=len(knots) - 1))
    values = 1e-6 * np.cumprod([1.0, *factors])
    found = Curve.fit(samples(lambda n: np.interp(n, knots, values)))
    assert len(found.knots) <= len(knots)
    assert found.residual < 4e-3
    for size in range(SIZES[0], SIZES[-1], SIZES[-1] // 50):
        assert found(size) == pytest.approx(np.interp(size, knots, values), rel=2e-2)


def test_a_kink_and_a_jump_are_seen():
    kink = Curve.fit(samples(lambda n: 1e-4 + 1e-9 * n + 5e-9 * max(0, n - SIZES[4])))
    assert kink.knots == (SIZES[0], SIZES[4], SIZES[-1]) and kink.residual < 1e-12
    jump = Curve.fit(samples(lambda n: 1e-4 + 1e-9 * n + (1e-3 if n > SIZES[4] else 0)))
    assert jump.knots == (SIZES[0], SIZES[4], SIZES[5], SIZES[-1]) and jump.residual < 1e-12


def test_noise_is_not_followed():
    """A line whose medians are 5 % off, as their spread and number own up to, stays a line, nearly always."""
    found = [Curve.fit(samples(lambda n: 1e-4 + 1e-9 * n, spread=0.15, noise=0.05, seed=s)) for s in range(40)]
    assert sum(len(curve.knots) == 2 for curve in found) >= 38
    assert all(0.01 < curve.residual < 0.12 for curve in found)
    # Interpolation would be off by the noise at every size; the fit is nearer.
    off = [abs(curve(SIZES[4]) / (1e-4 + 1e-9 * SIZES[4]) - 1) for curve in found]
    assert np.median(off) < 0.03


@FEW
@given(measurements())
def test_any_fit_never_falls_and_says_its_residual(rows):
    found = Curve.fit(rows)
    assert all(a <= b for a, b in zip(found.values, found.values[1:])) and found.values[0] >= 0
    assert set(found.knots) <= {row.size for row in rows}
    deviations = [(found(row.size) - row.seconds) / row.seconds for row in rows]
    assert found.residual == pytest.approx(np.sqrt(np.mean(np.square(deviations))), rel=1e-6, abs=1e-9)
    assert sorted(found.samples, key=repr) == sorted(rows, key=repr)
    assert found.spread == pytest.approx(np.median([row.spread for row in rows]))


@FEW
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_all_knots_give_the_least_squares_that_never_fall(times):
    """The active sets against the best of a dense search around them: no small step that keeps the order helps."""
    from espresso_mpi.planner.model.fitting import Fit

    t = np.array(times)
    fit = Fit(np.arange(1.0, 1 + len(t)), t)
    values = fit.values(fit.x)
    best = np.sum((values / t - 1) ** 2)
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1e-2, 1e-1):
        others = np.sort(np.maximum(0, values + scale * rng.standard_normal((200, len(t)))), axis=1)
        assert np.all(np.sum((others / t - 1) ** 2, axis=1) >= best - 1e-12)


def test_falling_times_become_a_constant_between_them():
    found = Curve.fit([Sample(1, 2.0, 0.0, 1), Sample(2, 1.0, 0.0, 1)])
    # min (v/2 - 1)² + (v/1 - 1)²: v = (1/2 + 1) / (1/4 + 1)
    assert found.values == pytest.approx((1.2, 1.2))


def test_one_size_is_a_constant_and_none_is_refused():
    found = Curve.fit([Sample(100, 1.0, 0.1, 3), Sample(100, 3.0, 0.3, 3)])
    assert found.knots == (100,) and found.values == pytest.approx((1.2,))  # (1 + 1/3) / (1 + 1/9)
    assert found.spread == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="no samples"):
        Curve.fit([])


# --- profiles ---------------------------------------------------------------------------------------------------------


def profile(**changes):
    fitted = Curve.fit(samples(lambda n: 1e-5 + 3.3e-10 * n, spread=0.04, noise=0.03))
    content = {
        "nodes": 2,
        "ranks_per_node": 2,
        "codecs": {("onebit", "cpu", "encode"): fitted, ("topk:ratio=0.01", "cpu", "decode"): Curve.line(1e-6, 1e-9)},
        "moves": {
            ("alltoall", "inter", False): fitted,
            ("alltoall", "inter", True): Curve.line(1e-5, 1e-9),
            ("allreduce", "flat", False): Curve.line(2e-5, 1e-9),
        },
        "copies": {"to_host": Curve.line(1e-5, 1e-10)},
        "check": Curve.line(0, 1e-11),
        "call": 1.1e-5,
        "tensor": 0.7e-5,
        "segment_bytes": 1 << 20,
        "environment": {"cpu": "some", "versions": {"numpy": None}},
        "fingerprint": {"nodes": 2, "ranks_per_node": 2, "mpi": "Open MPI 5"},
    }
    return Profile(**{**content, **changes})


@pytest.mark.parametrize("on_gpu", [None, Curve.line(5e-6, 1e-12)])
def test_a_profile_comes_back_from_disk_exactly(tmp_path, on_gpu):
    made = profile(check_on_gpu=on_gpu)
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]  # nothing unfinished is left
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["version"] == 1
    assert set(document["codecs"]) == {"onebit|cpu|encode", "topk:ratio=0.01|cpu|decode"}
    assert set(document["moves"]) == {"alltoall@inter", "alltoall@inter|alone", "allreduce@flat"}


@FEW
@given(curves(), st.floats(0, 1), measurements())
def test_any_curve_comes_back_exactly(curve, residual, rows):
    whole = Curve(curve.knots, curve.values, residual, tuple(rows))
    assert Curve.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_saving_fails_whole(tmp_path):
    profile().save(tmp_path / "p.json")
    before = (tmp_path / "p.json").read_text()
    with pytest.raises(ConfigError, match="cannot be written"):
        profile().save(tmp_path / "nowhere" / "p.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        profile().save(tmp_path / "folder")
    assert (tmp_path / "p.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "p.json"]


@pytest.mark.parametrize(
    "path, value, says",
    [
        (("kind",), "a plan", "a plan"),
        (("version",), 2, "version 2"),
        (("version",), True, "version True"),
        (("nodes",), 0, "nodes: got 0"),
        (("nodes",), 2.0, "nodes: got 2.0"),
        (("ranks_per_node",), "2", "ranks_per_node: got '2'"),
        (("call",), -1e-9, "call"),
        (("tensor",), None, "tensor"),
        (("segment_bytes",), -1, "segment_bytes"),
        (("measured",), 1, "measured"),
        (("environment",), 3, "environment"),
        (("more",), 1, "more"),
        (("codecs",), [], "codecs"),
        (("codecs", "onebit|tpu|encode"), {}, "onebit|tpu|encode"),
        (("codecs", "onebit|cpu"), ZERO.to_json(), "expected spec"),
        (("codecs", "|cpu|encode"), ZERO.to_json(), "got ''; expected text of length"),
        (("moves", "alltoall@rack"), {}, "alltoall@rack"),
        (("moves", "alltoall@flat|alone"), {}, "alltoall@flat|alone"),
        (("copies", "to_disk"), {}, "to_disk"),
        (("check",), None, "check"),
        (("check", "knots"), 3, "check: knots: got 3; expected a list"),
        (("check", "values"), [0, -1], "check: values.1.: got -1; expected a finite number of at least 0"),
        (("check", "values", 0), "0", "check: values.0.: got '0'; expected a finite number"),
        (("check", "samples"), [[1, 2]], "expected a list of at least length 4 .size, seconds, spread, repeats"),
        (("check", "samples"), [[1, 0, 0, 1]], "seconds"),
        (("check", "residual"), -1, "residual"),
        (("check", "colour"), "red", "colour"),
        (("moves", "alltoall@inter", "knots"), [2, 1], "moves: alltoall@inter: curve: knots"),
    ],
)
def test_what_is_no_profile(tmp_path, path, value, says):
    document = profile(codecs={}).to_json()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=says.replace("|", "\\|")) as raised:
        Profile.load(tmp_path / "p.json")
    assert str(tmp_path / "p.json") in str(raised.value)


def test_missing_entries_and_other_files(tmp_path):
    for key in profile().to_json():
        document = copy.deepcopy(profile().to_json())
        del document[key]
        with pytest.raises(ConfigError, match=key):
            Profile.from_json(document)
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.load(path)
    for text in ("", "{", "[]", "3", '{"kind": "espresso_mpi profile", "version": 1, "call": NaN}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"p\.json"):
            Profile.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"p\.json"):
        Profile.load(path)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"codecs": {("onebit", "tpu", "encode"): ZERO}}, "codecs"),
        ({"codecs": {("onebit", 3): ZERO}}, "got 3; expected text"),
        ({"codecs": {("onebit", "cpu", "encode"): 3}}, "got 3; expected an object .knots"),
        ({"moves": {("alltoall", "flat", True): ZERO}}, "moves"),
        ({"moves": {"alltoall": ZERO}}, "got 'alltoall'; expected a list"),
        ({"copies": {"to_tape": ZERO}}, "copies"),
        ({"copies": []}, "expected an object"),
        ({"check": None}, "check: got None; expected an object .knots"),
        ({"fingerprint": {"a": object()}}, "JSON cannot hold"),
        ({"environment": {"a": float("nan")}}, "JSON cannot hold"),
    ],
)
def test_what_is_refused_when_made(changes, says):
    with pytest.raises(ConfigError, match=says):
        profile(**changes)


def test_asking_for_curves():
    made = profile()
    assert made.codec("onebit", "cpu", "encode") is made.codecs["onebit", "cpu", "encode"]
    # topk's default is 1 %: both specs are the same compressor
    assert made.codec("topk", "cpu", "decode") is made.codecs["topk:ratio=0.01", "cpu", "decode"]
    assert made.codec("topk:ratio=0.01", "cpu", "decode") is made.codec("topk", "cpu", "decode")
    assert made.codec("topk:ratio=0.25~0.01@400", "cpu", "decode") is made.codec("topk", "cpu", "decode")
    foreign = profile(codecs={("not-here", "cpu", "encode"): ZERO})  # of a method that is registered elsewhere
    assert foreign.codec("not-here", "cpu", "encode") is ZERO
    for asked in (("onebit", "gpu", "encode"), ("onebit", "cpu", "decode"), ("topk:ratio=0.5", "cpu", "decode")):
        with pytest.raises(ConfigError, match=rf"{asked[2]} of '{asked[0]}' on {asked[1]}.*it has"):
            made.codec(*asked)
    assert made.move("alltoall", "inter", True) != made.move("alltoall", "inter")
    with pytest.raises(ConfigError, match=r"gather@inter\|alone is not in it"):
        made.move("gather", "inter", True)
    assert made.copy("to_host")(0) == 1e-5
    with pytest.raises(ConfigError, match="to_gpu"):
        made.copy("to_gpu")


def test_levels_with_a_single_member_cost_nothing():
    one = profile(nodes=1, moves={("allreduce", "intra", False): Curve.line(1, 0)})
    assert one.move("alltoall", "inter") is ZERO and one.move("alltoall", "inter", True) is ZERO
    with pytest.raises(ConfigError):
        one.move("alltoall", "flat")
    single = profile(ranks_per_node=1, moves={("alltoall", "inter", False): Curve.line(3, 0)})
    assert single.move("alltoall", "intra") is ZERO
    assert single.move("alltoall", "inter", True)(0) == 3  # a node's only rank is always alone
    assert profile(nodes=1, ranks_per_node=1, moves={}).move("allreduce", "flat") is ZERO


def test_noise_is_the_typical_error_of_a_median():
    def spread(value):
        return Curve((1,), (1.0,), 0.0, (Sample(1, 1.0, value, 4),))

    made = profile(
        codecs={("onebit", "cpu", "encode"): spread(0.01), ("onebit", "cpu", "decode"): spread(0.05)},
        moves={("allreduce", "flat", False): spread(0.3)},
    )
    assert made.noise() == pytest.approx(0.025)  # of three; curves that were not measured do not count
    assert profile(codecs={}, moves={}).noise() == 0


def test_differences_in_words():
    a = {"nodes": 2, "mpi": "Open MPI 5", "versions": {"numpy": "1", "numba": "2"}, "old": 1}
    b = {"nodes": 4, "mpi": "Open MPI 5", "versions": {"numpy": "1", "numba": "3"}}
    assert difference(a, a) == []
    assert difference(a, b, ("the plan", "here")) == [
        "nodes: 2 (the plan), 4 (here)",
        "old: 1 (the plan), not said (here)",
        "versions.numba: 2 (the plan), 3 (here)",
    ]
