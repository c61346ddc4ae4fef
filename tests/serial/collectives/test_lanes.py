"""The executor's lanes against the timeline: the same operations at the same moments; and what they do when tensors
come otherwise than planned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_profile, random_workload
from timeline_cases import random_case, simulated

from espresso_mpi.collectives.data.layout import Dense, Topology
from espresso_mpi.collectives.lanes import LaneRunner
from espresso_mpi.collectives.program import compile_route
from espresso_mpi.collectives.progress import Segment
from espresso_mpi.collectives.route_operations import RouteOperation, route_operations
from espresso_mpi.compressors import get
from espresso_mpi.planner.lane_tables import by_lane
from espresso_mpi.planner.model.cost import Shape, walk
from espresso_mpi.planner.model.dispatch import laid_out
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.pictures import shown
from espresso_mpi.planner.plan import plan
from espresso_mpi.planner.planfile import from_json, to_json
from espresso_mpi.timetable import Lanes, Schedule, Timetable

PLACES = ("gpu", "cpu", "intra", "inter")


def operation(what, lanes, lane):
    """An operation on a lane, with three progress steps if it is a collective."""
    resource = next((place for place in PLACES if lanes.of(place) == lane), "cpu")
    return RouteOperation(what, resource, 3 if resource in ("intra", "inter") else 1, ())


def timetables(timeline, choice):
    """The schedule of a choice, with the parts of the backward pass as buffers of their own."""
    starts, lanes = timeline.starts(choice), timeline.lanes
    first, _, where, took, _ = laid_out(choice, timeline.tables)
    found = {}
    for tensor, row in enumerate(choice):
        part, stop, count = first[tensor], first[tensor + 1], int(timeline.options.count[row])
        begin = float(starts[part])
        found[f"backward {tensor}"] = Timetable(
            begin, 0.0, ("part",), (lanes.backward,), (float(took[part]),), ((begin,),)
        )  # fmt: skip
        once = slice(part + 1, part + 1 + count)
        rows = starts[part + 1 : stop].reshape(-1, count) if count else np.zeros((1, 0))
        found[f"tensor {tensor}"] = Timetable(
            begin, 0.0, tuple(map(str, range(count))), tuple(where[once].tolist()), tuple(took[once].tolist()),
            tuple(map(tuple, rows.tolist())),
        )  # fmt: skip
    return Schedule(Lanes(*(lanes.of(place) for place in PLACES), lanes.backward), found)


def gone_through(schedule):
    """{(buffer, segment, place): when it begins}, if gradients come when the backward pass has made them."""
    begun, unfinished = {}, {}
    on_lanes = LaneRunner(schedule, pytest.fail, lambda lane, s, at, now: begun.update({(s.bucket, s.number, at): now}))

    def operation_progress(name, number, ways, then):
        for way in ways:
            unfinished[name, number] = way.what
            yield iter([None] * (way.progress_steps - 1))
        unfinished.pop((name, number), None)
        then()

    def bring(name, then=lambda: None):
        table = schedule.buffers[name]
        ways = tuple(operation(what, schedule.lanes, lane) for what, lane in zip(table.operations, table.lanes))
        for number in range(len(table.starts)):
            on_lanes.add(Segment(name, number, operation_progress(name, number, ways, then), lambda: True, ways), 0.0)

    def compute(tensor):
        if f"backward {tensor}" in schedule.buffers:
            bring(f"backward {tensor}", lambda: (bring(f"tensor {tensor}"), compute(tensor + 1)))

    compute(0)
    while on_lanes.busy:
        assert on_lanes.progress(all_here=False)
    assert not unfinished
    return begun


@pytest.mark.parametrize("order", ["fifo", "priority", "schedule"])
@pytest.mark.parametrize("whole", [False, True])
def test_everything_begins_when_the_timeline_and_a_simulation_say(order, whole):
    for seed in range(120):
        timeline, choice = random_case(seed, order, whole)
        if whole:  # nothing takes no time: of such operations that begin at once starts do not tell the order
            options = replace(timeline.options, seconds=timeline.options.seconds + 1.0)
            timeline = replace(timeline, options=options, backward=timeline.backward + 1.0)
        starts, _ = simulated(timeline, choice)
        begun = gone_through(timetables(timeline, choice))
        for (tensor, segment, position), at in starts.items():
            key = (f"backward {position}", 0, 0) if tensor < 0 else (f"tensor {tensor}", segment, position)
            assert begun.pop(key) == pytest.approx(at, rel=1e-12, abs=1e-12), (seed, key)
        assert not begun


def shapes():
    return [((0,),), ((0, 1),), ((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))]


@pytest.mark.parametrize("home", ["cpu", "gpu"])
def test_operations_of_the_executor_are_those_that_the_planner_prices(home):
    """Every route, on every shape of cluster, on every rank: the same operations, with all steps of the route."""
    method = get("int4")
    everything = routes(("cpu", "gpu") if home == "gpu" else ("cpu",))
    for nodes, route in itertools.product(shapes(), everything[:: 1 if home == "cpu" else 37]):
        topology, whole = Topology(nodes), Dense(0, 4096)
        slots = walk(route, Shape(len(nodes), len(nodes[0]), home))
        for rank in range(topology.size):
            steps = compile_route(route, topology, whole, "float32", rank, method if route.compressed else None)
            found = route_operations(route, steps, topology, home)
            expected = [(s.what, s.resource) for s in slots]
            assert [(f.what, f.resource) for f in found] == (expected or [("nothing", "cpu")])
            assert [at for f in found for at in f.steps] == list(range(len(steps)))


# --- tensors that come otherwise than planned -------------------------------------------------------------------------

TWO = Schedule(
    Lanes(0, 1, 2, 3, 0),
    {
        "a": Timetable(0.0, 1.0, ("encode", "send"), (0, 3), (1.0, 2.0), ((3.0, 4.0),)),
        "b": Timetable(1.0, 1.0, ("encode", "send"), (0, 3), (1.0, 2.0), ((2.0, 6.0),)),
    },
)
"""Gradients take a second each on the lane that also encodes; b is encoded before a, and sent after it."""


def begun_of(schedule, coming, all_here=False):
    """Which operations begin, in order, when some buffers arrive, one a step; and whether anything is left."""
    found = []
    lanes = LaneRunner(schedule, pytest.fail, lambda lane, segment, at, now: found.append((segment.bucket, at)))
    for name in coming:
        ways = tuple(operation(*way) for way in zip(("encode", "send"), itertools.repeat(schedule.lanes), (0, 3)))
        lanes.add(Segment(name, 0, iter([iter(()), iter(())]), lambda: True, ways), 0.0)
        lanes.progress(all_here)
    while lanes.progress(all_here):
        pass
    return found, lanes.busy


def test_an_operation_waits_for_the_gradients_that_come_before_it_on_its_lane():
    assert begun_of(TWO, ["a"]) == ([], True)
    assert begun_of(TWO, ["a"], all_here=True) == ([("a", 0), ("a", 1)], False)
    assert [name for name, at in begun_of(TWO, ["a", "b"])[0] if at == 0] == ["b", "a"]


def test_messages_are_posted_ahead_in_the_order_of_the_schedule():
    """c is ready last, and is to be sent second: b waits for it, though its own messages could be posted before."""
    schedule = Schedule(
        Lanes(0, 1, 2, 3, 4),
        {
            name: Timetable(0.0, 0.0, ("encode", "alltoall@inter"), (1, 3), (1.0, 10.0), ((encode, send),))
            for name, encode, send in (("a", 0.0, 1.0), ("b", 1.0, 21.0), ("c", 2.0, 11.0))
        },
    )
    happened = []

    def operation_progress(name):
        yield iter(())

        def send():
            happened.append(f"post {name}")
            yield
            happened.append(f"end {name}")

        yield send()

    lanes = LaneRunner(schedule, pytest.fail)
    operations = (RouteOperation("encode", "cpu", 1, ()), RouteOperation("alltoall@inter", "inter", 2, ()))
    for name in schedule.buffers:
        lanes.add(Segment(name, 0, operation_progress(name), lambda: True, operations), 0.0)
    while lanes.progress(True):
        pass
    assert happened == ["post a", "post c", "post b", "end a", "end c", "end b"]


def test_what_the_schedule_does_not_know_comes_last():
    found, busy = begun_of(TWO, ["c", "a", "b"], all_here=True)
    assert not busy and sorted(found) == sorted((name, at) for name in "abc" for at in (0, 1))
    both = begun_of(TWO, ["a", "b", "c"])[0]
    assert [name for name, at in both if at == 0] == ["b", "a", "c"]


def test_operations_that_are_not_those_of_the_schedule():
    said = []
    lanes = LaneRunner(TWO, said.append)
    for _ in range(2):
        lanes.add(Segment("a", 0, iter([iter(())]), lambda: True, (operation("decode", TWO.lanes, 0),)), 0.0)
    while lanes.progress(True):
        pass
    assert not lanes.busy and len(said) == 1 and "'encode', 'send'" in said[0] and "'decode'" in said[0]


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "device"), [(0, "cpu"), (1, "gpu"), (2, "gpu")])
def test_the_schedule_of_a_plan_ends_when_its_forecast_says_and_is_what_the_picture_shows(seed, device):
    rng = np.random.default_rng(seed)
    profile, workload = random_profile(rng), random_workload(rng, 9, device)
    made = plan(workload, profile, [COMPRESSOR], order="schedule")
    assert from_json(to_json(made)) == made  # as values, too: ranks hand plans to each other so
    lanes = by_lane(made.schedule)
    for done in lanes.values():
        assert all(one.stop <= then.start + 1e-12 for one, then in itertools.pairwise(done))
    end = max(one.stop for done in lanes.values() for one in done)
    assert end + profile.call + workload.update == pytest.approx(made.forecast.seconds, rel=1e-12)
    problem, choice = evaluated(made, workload, profile, lanes=made.forecast.lanes, order="schedule")
    drawn = [(one.start, one.lane, one.what) for one in shown(problem, choice) if one.kind != "backward"]
    kept = [(one.start, lane, one.what) for lane, done in lanes.items() for one in done if one.segment >= 0]
    assert sorted(drawn) == sorted(kept)


def test_a_call_without_planned_operations_runs():
    """As collectives do that are no mean of gradients."""
    done = []

    def progress():
        yield
        done.append("whole")

    runner = LaneRunner(Schedule(Lanes(*range(5)), {}))
    runner.add(Segment("allgather", 0, iter([progress()]), lambda: True), 0.0)
    runner.progress(all_here=True)
    assert done == ["whole"] and not runner.busy
