"""What the profiler works out from numbers: which sizes, whose times count, when a median is known, how calls split."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.autotune.profiling import fits, moves, repeating, request
from espresso_mpi.cli import profile as bench
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.planner.model.curve import Curve, Sample
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.types import Collective, Route

TWO_BY_TWO = Topology(((0, 1), (2, 3)))


def test_the_measured_routes_have_every_move_of_the_tree():
    every = [Route.parse(text) for text in (*moves.DENSE, *moves.PACKED)]
    assert all(route in routes(("cpu",)) for route in every)
    found = {key for route in every for key in moves.keys_along(route, TWO_BY_TWO) if key}
    wanted = {key for route in routes(("cpu",), linear=True) for key in moves.keys_along(route, TWO_BY_TWO) if key}
    assert found == wanted


def test_a_single_rank_of_a_node_is_not_alone():
    ones = Topology(((0,), (1,)))
    keys = {key for route in routes(("cpu",)) for key in moves.keys_along(route, ones) if key}
    assert not any(alone for _, _, alone in keys)


@pytest.mark.parametrize("text", [*moves.DENSE, *moves.PACKED])
def test_keys_stand_at_the_steps(text):
    route = Route.parse(text)
    keys = moves.keys_along(route, TWO_BY_TWO)
    for step, key in zip(route.steps, keys, strict=True):
        assert (key[:2] if key else None) == ((step.op, step.level) if isinstance(step, Collective) else None)


def test_a_step_lasts_from_the_last_begin_to_the_last_end():
    rank0 = [[[0.0, 1.0], [1.0, 4.0]]]
    rank1 = [[[0.5, 2.0], [2.0, 3.0]]]
    np.testing.assert_allclose(repeating.telescoped(np.array([rank0, rank1])), [[1.5, 2.0]])


def test_steps_that_follow_each_other_add_up():
    ends = np.cumsum(np.random.default_rng(0).random((4, 7, 6)), axis=2)
    marks = np.stack([ends[..., :-1], ends[..., 1:]], axis=3)
    whole = np.max(ends[..., -1], axis=0) - np.max(ends[..., 0], axis=0)
    np.testing.assert_allclose(np.sum(repeating.telescoped(marks), axis=1), whole)


def test_calls_are_shared_out():
    count, nbytes = np.array([1, 1, 1, 6, 6.0]), np.array([4e3, 6e4, 5e5, 2e4, 4e5])
    seconds = 3e-4 + 2e-5 * count + 1e-10 * nbytes
    rows = np.stack([count, nbytes, seconds, seconds + 1e-3 * count], axis=1)
    found, left = fits.call_costs(rows)
    np.testing.assert_allclose(found, (3e-4, 2e-5, 1e-10), rtol=1e-9)
    assert left < 1e-20


def test_no_share_is_below_nothing():
    count, nbytes = np.array([1, 1, 1, 6, 6.0]), np.array([4e3, 6e4, 5e5, 2e4, 4e5])
    rows = np.stack([count, nbytes, 5e-4 - 1e-5 * count, np.full(5, 1e-3)], axis=1)
    (call, tensor, byte), left = fits.call_costs(rows)
    assert call > 0 and tensor == 0 and byte >= 0 and left > 0
    assert fits.call_costs(rows * [1, 1, -1, 1])[0] == (0, 0, 0)


def test_a_steeper_curve():
    curve = Curve((0.0, 100.0), (1.0, 2.0), 0.0, (Sample(100, 2.0, 0.1, 5),))
    steeper = fits.steeper(curve, 0.5)
    assert (steeper(0), steeper(100), steeper(200)) == (1.0, 52.0, 103.0)
    assert steeper.samples[0].seconds == 52.0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_ends_come_first(count):
    order = repeating.ends_first(range(10, 10 + count))
    assert sorted(order) == list(range(10, 10 + count))
    assert order[0] == 10
    assert count < 3 or set(order[:3]) == {10, 10 + (count - 1) // 2, 9 + count}


def test_few_sizes_are_spread_out():
    assert request.spread([7, 3, 3, 5]) == (3, 5, 7)
    many = request.spread(range(1, 100_000))
    assert len(many) == request.POINTS and (many[0], many[-1]) == (1, 99_999)
    ratios = [b / a for a, b in itertools.pairwise(many)]
    assert max(ratios) / min(ratios) < 1.2


def test_regions_of_tensors():
    assert request.regions([4000], TWO_BY_TWO) == {4000, 2000, 1000}


def test_guesses_go_along_the_line_through_smaller_sizes():
    known = {10: 5.0, 100: 2.0, 1000: 3.0, 9000: 99.0}
    assert repeating.guess(known, 1900) == 4.0
    assert repeating.guess(known, 500) == 2.0, "never less than the larger of them took"
    assert repeating.guess(known, 100) == 0.0, "nothing is known of it"


def test_a_size_that_takes_too_long_becomes_smaller():
    known = {10: 1.0, 100: 10.0}
    assert repeating.affordable(known, 1000, 100.0) == 1000
    assert repeating.affordable(known, 1000, 55.0) == 550
    assert repeating.affordable(known, 1000, 9.0) == 0, "the largest that is known took longer"
    assert repeating.affordable({10: 3.0, 100: 3.0}, 1000, 3.0) == 1000


class Alone(repeating.Repeating):
    """One rank, whose passes take ``start`` seconds, and ``byte`` for each byte, by a clock of their own."""

    def __init__(self, monkeypatch, seconds, start, byte):
        self.now, self.start, self.byte = 0.0, start, byte
        monkeypatch.setattr(repeating.time, "perf_counter", lambda: self.now)
        transport = SimpleNamespace(topology=SimpleNamespace(size=1), waiter=SimpleNamespace())
        super().__init__(transport, seconds, lambda share: None)
        self.begin()

    def _of_all(self, mine):
        return mine[np.newaxis]

    def _compare_clocks(self):
        pass

    def visit(self, size):
        def one():
            begun = self.now
            self.now += self.start + self.byte * size
            return [begun, self.now]

        return repeating.telescoped(repeating.paired(self.passes(one)))

    def survey(self, families, sizes):
        """Bytes that were visited, by family, where every tensor of ``sizes`` bytes is asked for."""
        self.allow("moves")
        points = [
            repeating.Point(f"{f} at {n}", f, n, self.visit) for n in repeating.ends_first(sizes) for f in families
        ]
        found = {}
        for point in self.surveyed(points, reach=self.reach(self.visit, max(sizes), len(families))):
            found.setdefault(point.family, []).append(point.size)
        return found


SIZES_OF_A_GPT = (36, 780, 26112, 524288, 12834816)


@pytest.mark.parametrize(("start", "byte"), [(2e-3, 8e-8), (2e-3, 8e-7), (2e-2, 8e-8)])
def test_measuring_keeps_its_time_where_links_are_slow(monkeypatch, start, byte):
    """100 and 10 Mbit/s, and ranks that share cores with other work."""
    measuring = Alone(monkeypatch, 4.0, start, byte)
    found = measuring.survey(range(15), SIZES_OF_A_GPT)
    least = 2 * 15 * (start + byte * 26112) + 5 * (start + byte * (1 << 16))  # two sizes of each, and the search
    assert measuring.now < max(1.3 * 0.42 * 4.0, least)
    for family, sizes in found.items():
        assert len(sizes) >= 2 and max(sizes) >= 26112, "the curve tells what a byte costs"
        assert max(sizes) == 12834816 or f"{family} at 12834816" in measuring.left_out


def test_measuring_takes_all_sizes_where_there_is_time(monkeypatch):
    measuring = Alone(monkeypatch, 4.0, 1e-4, 1e-10)
    found = measuring.survey(range(15), SIZES_OF_A_GPT)
    assert all(sorted(sizes) == list(SIZES_OF_A_GPT) for sizes in found.values()) and len(found) == 15
    assert not measuring.left_out


def test_what_took_too_long_to_be_repeated_spreads_as_the_others():
    times = repeating.Times()
    times.note("a", 10, [1.0, 1.2, 1.4])
    times.note("a", 1000, [5.0])
    assert [sample.spread for sample in times.curves()["a"].samples] == pytest.approx([1 / 6, 1 / 6])


def test_a_point_is_settled_when_its_median_is_known():
    point = repeating.Point("", "", 1, np.empty)
    rng = np.random.default_rng(1)
    point.found = rng.normal([1.0, 1e-3], [0.01, 1e-3], (5, 2))
    assert point.settled, "a step of a thousandth does not hold up all"
    point.found = rng.normal(1.0, 0.5, (5, 1))
    assert not point.settled
    point.found = rng.normal(1.0, 0.5, (repeating.MOST, 1))
    assert point.settled


def _profile(spread, left_out):
    curve = Curve((0.0, 1.0), (1e-6, 2e-6), 0.0, (Sample(1, 2e-6, spread, 5),))
    moves = {("allreduce", "flat", False): curve, ("reduce", "inter", True): curve}
    codecs = {("onebit", "cpu", "encode"): curve}
    return Profile(2, 2, codecs, moves, {}, curve, environment={"left_out": left_out})


def test_the_summary_warns():
    assert bench.remarks(_profile(0.01, [])) == []
    rough, left = bench.remarks(_profile(0.5, ["allreduce@flat at 16777216 bytes"] * 2))
    assert "22%" in rough and "2 points" in left and "16777216 bytes" in left


def test_the_summary_names_every_curve():
    codecs, moves = bench.tables(_profile(0.01, []))
    assert [line[0] for line in codecs] == ["onebit encode@cpu"]
    assert [line[0] for line in moves] == ["allreduce@flat", "reduce@inter, roots alone"]
