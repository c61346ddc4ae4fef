"""Plans as values and as files: what is kept, what is refused, and whether a plan fits what it is used for."""

import json
import math
import re
from dataclasses import replace

import pytest

from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.planner.planfile import load, misfits, save, to_json
from espresso_mpi.timetable import Lanes, Schedule, Timetable
from espresso_mpi.types import Forecast, MadeFor, Outlook, Plan, Strategy, TensorSpec

DENSE, ONEBIT = Strategy("none", "flat"), Strategy("onebit", "flat-alltoall")
STRATEGIES = {"w": ONEBIT, "b": DENSE, "c": DENSE}
MADE_FOR = MadeFor(
    {"w": ((4, 3), "float32"), "b": ((3,), "float32"), "c": (7, "float64")},
    2,
    4,
    "cpu",
    {"mpi": "Open MPI 5.0", "nodes": 2},
)
FORECAST = Forecast(
    0.3, 0.25, 0.2, 0.4, 0.01, "fifo", "host", "all routes", 0.0, {"fp32": 0.4},
    (Outlook(("w",), 0.1, 0.05, DENSE, 0.02, 0.03), Outlook(("b", "c"), 0.01, 0.0)), 0.1,
)  # fmt: skip

SCHEDULE = Schedule(
    Lanes(0, 1, 1, 2, 3),
    {"w": Timetable(0.0, 0.1, ("encode@cpu", "alltoall@flat"), (1, 2), (0.01, 0.02), ((0.1, 0.11), (0.11, 0.13)))},
)


def made(**more):
    return Plan(STRATEGIES, groups=(("b", "c"),), fuse_bytes=0, made_for=MADE_FOR, forecast=FORECAST,
                schedule=SCHEDULE, **more)  # fmt: skip


# --- the value --------------------------------------------------------------------------------------------------------


def test_digests_of_plans_without_the_new_fields_stay():
    plan = Plan(STRATEGIES, Strategy("fp16", "flat-alltoall"), (("b", "c"),))
    assert plan.digest == "8accdd45cacaf1a9d66f7289ff512b8e5c51b6337aabd160b72a2a38d11b3bf6"


def test_digest_holds_what_is_done_and_nothing_else():
    plan = made()
    assert replace(plan, made_for=None, forecast=None).digest == plan.digest
    assert len({replace(plan, fuse_bytes=fuse).digest for fuse in (None, 0, 4096)}) == 3
    assert replace(plan, held=True).digest != plan.digest
    later = replace(SCHEDULE.buffers["w"], starts=((0.1, 0.11), (0.11, 0.14)))
    others = (None, SCHEDULE, replace(SCHEDULE, buffers={"w": later}))
    assert len({replace(plan, schedule=schedule).digest for schedule in others}) == 3


def test_gap():
    assert made().gap == pytest.approx(0.2)
    assert Plan({"w": DENSE}).gap is None
    assert replace(made(), forecast=replace(FORECAST, seconds=0.0, bound=0.0)).gap == 0


@pytest.mark.parametrize("fuse", [-1, 1.5, True, "0"])
def test_fuse_bytes_is_checked(fuse):
    with pytest.raises(PlanError, match=r"fuse_bytes.*expected a number of bytes"):
        Plan(STRATEGIES, fuse_bytes=fuse)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"seconds": (math.nan, 0.0)}, r"seconds\[0\]: got nan; expected a finite number"),
        ({"seconds": (0.0, math.inf)}, r"seconds\[1\]: got inf"),
        ({"starts": ((0.0, -1.0),)}, r"starts\[0\]\[1\]: got -1.0"),
        ({"lanes": (-1, 1)}, r"lanes\[0\]: got -1; expected a whole number of at least 0"),
        ({"operations": None}, "operations: got None; expected a list"),
    ],
)
def test_timetables_that_would_never_end_are_refused(what, said):
    """Lanes are gone through from one moment to the next: nothing comes after NaN."""
    with pytest.raises(ConfigError, match=said):
        replace(SCHEDULE.buffers["w"], **what)


def test_schedules_are_checked():
    with pytest.raises(ConfigError, match="lanes: gpu: got 99; expected a whole number of at most 7"):
        Lanes(99)
    for lanes, buffers in ((None, {}), (Lanes(), None), (Lanes(), {"w": None})):
        with pytest.raises(PlanError, match="expected Lanes and a Timetable for each buffer"):
            Schedule(lanes, buffers)


# --- files ------------------------------------------------------------------------------------------------------------


def test_held_is_checked():
    with pytest.raises(PlanError, match="held=1; expected True or False"):
        Plan(STRATEGIES, held=1)


@pytest.mark.parametrize("plan", [Plan({"w": DENSE}), Plan(default=ONEBIT, held=True), made(), made(default=ONEBIT)])
def test_round_trip(tmp_path, plan):
    save(plan, tmp_path / "plan.json")
    back = load(tmp_path / "plan.json")
    assert back == plan
    assert back.digest == plan.digest


def changed(tmp_path, change):
    document = json.loads(json.dumps(to_json(made())))
    change(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    return path


def put(*keys, value):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("version", value=2), "version 2; expected 1"),
        (put("kind", value="something"), "kind 'something'; expected"),
        (put("more", value=1), "unknown field `more`; expected an object .digest"),
        (lambda d: d.pop("groups"), "missing required field `groups`"),
        (put("strategies", value=[]), r"strategies: got \[\]; expected an object"),
        (
            put("strategies", "w", value=["onebit"]),
            r"strategies: w: got \['onebit'\]; expected a list .* .compressor, route",
        ),
        (put("strategies", "w", value=["onebit", "flat"]), "w: compressor 'onebit' does not go with route"),
        (put("strategies", "w", value=["none", "nowhere"]), "w: route: cannot read the step"),
        (put("groups", value=[["b", "w"]]), "another strategy"),
        (put("groups", value=[]), "digest.*changed after it was made"),
        (put("digest", value="0" * 64), "digest"),
        (put("fuse_bytes", value=-1), "fuse_bytes: got -1"),
        (put("made_for", "nodes", value=0), "nodes: got 0"),
        (put("made_for", "device", value="tpu"), "device: got 'tpu'"),
        (put("made_for", "tensors", "w", value=3), r"tensors: w: got 3; expected a list"),
        (put("made_for", "tensors", "w", value=[[4, -3], "float32"]), r"tensors: w\[0\]\[1\]: got -3"),
        (put("forecast", "seconds", value="soon"), "seconds: got 'soon'"),
        (put("forecast", "order", value="lifo"), "order: got 'lifo'"),
        (put("forecast", "hope", value=1), "unknown field `hope`"),
        (put("forecast", "buffers", 0, "margin", value=None), r"buffers\[0\]: margin: got None"),
        (
            put("forecast", "buffers", 0, "runner_up", value="none"),
            r"runner_up: got 'none'; expected a list or null .compressor, route",
        ),
        (put("forecast", "baselines", value={"fp32": -1}), "baselines: fp32"),
        (put("schedule", "lanes", "cpu", value=8), "schedule: lanes: cpu: got 8"),
        (put("schedule", "buffers", "w", "lanes", value=[1, 6]), "'w': an operation is on lane 6; expected .* below 4"),
        (put("schedule", "buffers", "w", "starts", value=[]), "2 operations and .* in 0 segments; expected one lane"),
        (put("schedule", "buffers", "w", "lanes", value=[1]), r"rows of \[1, 2\] entries in 2 segments"),
        (put("schedule", "buffers", "w", "starts", 1, value=[0.11, -1.0]), r"starts\[1\]\[1\]: got -1"),
        (put("schedule", value=None), "digest.*schedule beside it.*changed after it was made"),
    ],
)
def test_what_does_not_hold_is_refused(tmp_path, change, said):
    path = changed(tmp_path, change)
    with pytest.raises(ConfigError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).count("espresso-mpi plan --profile") == 1


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*; make one by espresso-mpi plan"):
        load(tmp_path / "none.json")
    (tmp_path / "text").write_text("a plan")
    with pytest.raises(ConfigError, match=r"expected JSON.*; make it anew by espresso-mpi plan"):
        load(tmp_path / "text")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(made(), tmp_path / "nowhere" / "plan.json")


# --- does it fit ------------------------------------------------------------------------------------------------------

SPECS = (TensorSpec("w", (4, 3), "float32"), TensorSpec("b", (3,), "float32"), TensorSpec("c", (7, 1), "float64"))


def test_what_it_was_made_for_fits():
    assert misfits(made(), SPECS, 2, 4, {"mpi": "Open MPI 5.0", "nodes": 2}) == []
    assert misfits(made(), SPECS[::-1], 2, 4) == []


def test_plans_made_by_hand_fit_everything():
    assert misfits(Plan(default=DENSE), SPECS, 9, 9, {"mpi": "MPICH"}) == []


def test_entries_without_elements_fit():
    assert misfits(made(), (*SPECS[:2], TensorSpec("c", (), None), TensorSpec("d", (0,), "float32")), 2, 4) == []


@pytest.mark.parametrize(
    ("specs", "nodes", "ranks", "fingerprint", "said"),
    [
        (SPECS, 3, 4, None, "nodes: 2 when the plan was made, 3 here"),
        (SPECS, 2, 1, None, "ranks on each node: 4 when the plan was made, 1 here"),
        (SPECS, 2, 4, {"mpi": "MPICH 4"}, r"mpi: Open MPI 5.0 \(the plan\), MPICH 4 \(here\)"),
        (SPECS[1:], 2, 4, None, "tensor 'w': in the plan, but not here"),
        (SPECS[:1], 2, 4, None, "tensors 'b', 'c': in the plan, but not here"),
        ((*SPECS, TensorSpec("d", (1,), "float32")), 2, 4, None, "tensor 'd': not in the plan"),
        ((TensorSpec("w", (3, 4), "float32"), *SPECS[1:]), 2, 4, None,
         r"tensor 'w': float32\[4, 3\] on the cpu in the plan, float32\[3, 4\] on the cpu here"),
        ((TensorSpec("w", (4, 3), "float16"), *SPECS[1:]), 2, 4, None, r"float16\[4, 3\] on the cpu here"),
        ((TensorSpec("w", (4, 3), "float32", "gpu"), *SPECS[1:]), 2, 4, None, "on the gpu here"),
        ((*SPECS[:2], TensorSpec("c", (8,), "float64")), 2, 4, None, r"'c': float64\[7 elements\] .* float64\[8\]"),
    ],
)  # fmt: skip
def test_each_difference_is_told(specs, nodes, ranks, fingerprint, said):
    found = misfits(made(), specs, nodes, ranks, fingerprint)
    assert len(found) == 1
    assert re.fullmatch(f".*{said}.*", found[0])


def test_many_differences_are_counted():
    names = [f"t{i}" for i in range(9)]
    plan = replace(made(), made_for=replace(MADE_FOR, tensors=dict.fromkeys(names, ((4,), "float32"))))
    assert misfits(plan, [], 2, 4) == ["tensors 't0', 't1', 't2' and 6 more: in the plan, but not here"]
    found = misfits(plan, [TensorSpec(name, (5,), "float32") for name in names], 2, 4)
    assert len(found) == 4
    assert found[-1] == "6 more tensors differ"


def test_a_default_serves_new_tensors():
    assert misfits(made(default=DENSE), (*SPECS, TensorSpec("d", (1,), "float32")), 2, 4) == []
