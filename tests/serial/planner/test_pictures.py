"""Pictures of planned steps, read back."""

from __future__ import annotations

import itertools
import json
import struct
from xml.etree import ElementTree

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_problem, random_profile, random_workload

from espresso_mpi.cli.plan import plan_main
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.curve import Curve
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import ORDERS
from espresso_mpi.planner.pictures import chrome, picture, shown
from espresso_mpi.planner.search.algorithms import reachable
from espresso_mpi.tracing.pictures import COLOURS


def mixed(problem, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([rng.choice(problem.options(tensor)) for tensor in range(problem.tensors)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lanes", ["one-network", "separate", "host"])
def test_everything_of_the_timeline_is_shown_and_rows_do_not_overlap(order, lanes):
    for seed in range(4):
        problem = random_problem([seed, 9], tensors=6, order=order, lanes=lanes)
        choice = mixed(problem, seed)
        found, intervals = shown(problem, choice), problem.timeline.intervals(choice)
        told = sorted((one.lane, one.start, one.stop) for one in found)
        assert told == sorted((one.lane, one.start, one.stop) for one in intervals)
        for key, group in itertools.groupby(sorted(found, key=lambda o: (o.lane, o.row)), lambda o: (o.lane, o.row)):
            ordered = sorted(group, key=lambda one: (one.start, one.stop))
            assert all(b.start >= a.stop - 1e-9 for a, b in itertools.pairwise(ordered)), key
        if order != "backprop":
            assert {one.row for one in found} == {0}


def test_kinds_are_those_of_the_route():
    problem = random_problem(4, tensors=3)
    for one in shown(problem, mixed(problem)):
        assert one.kind in COLOURS
        if one.kind in ("encode", "decode"):
            assert one.what.startswith(one.kind)
        assert (one.kind == "copy") == (" to " in one.what)
        assert (one.tensor == "") == (one.kind == "backward")


def test_the_check_is_shown_where_the_profile_has_one():
    rng = np.random.default_rng(0)
    profile, workload = random_profile(rng, tensor=1e-5), random_workload(rng, 3)
    checked = Problem.of(workload, profile, [COMPRESSOR], routes=reachable(), prune=False)
    choice = mixed(checked)
    kinds = [one.kind for one in shown(checked, choice)]
    assert kinds.count("check") == 3
    assert Curve.line(0, 0) == profile.check
    assert set(kinds) <= set(COLOURS)


@pytest.mark.parametrize("order", ORDERS)
def test_the_file_for_perfetto_holds_every_interval(tmp_path, order):
    problem = random_problem(5, tensors=6, order=order)
    choice, path = mixed(problem), tmp_path / "step.json"
    picture(problem, choice, path, "a title")
    content = json.loads(path.read_text())
    assert content == json.loads(json.dumps(chrome(problem, choice, "a title")))
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    told = sorted((event["ts"], event["dur"]) for event in events)
    expected = sorted((one.start * 1e6, (one.stop - one.start) * 1e6) for one in problem.timeline.intervals(choice))
    assert np.allclose(told, expected, atol=2e-3)
    assert content["otherData"]["seconds"] == problem.seconds(choice)
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert {event["tid"] for event in events} == set(names)
    assert "gpu" in names.values() and "intra+inter" in names.values()
    for tid in names:
        ordered = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(b[0] >= a[1] - 2e-3 for a, b in itertools.pairwise(ordered))


def test_a_drawing_can_be_read_back(tmp_path):
    problem = random_problem(6, tensors=5)
    choice = mixed(problem)
    picture(problem, choice, tmp_path / "step.png", "a title")
    header = (tmp_path / "step.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width == 14 * 150 and height > 300
    picture(problem, choice, tmp_path / "step.svg", "a title")
    text = (tmp_path / "step.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for kind in {one.kind for one in shown(problem, choice)}:
        assert COLOURS[kind] in text, kind
    # matplotlib writes every text as a comment beside its outlines
    written = [f"a title: 5 tensors, {problem.seconds(choice) * 1e3:.4g} ms", "gpu", "intra+inter", "milliseconds"]
    assert all(f"<!-- {one} -->" in text for one in written)


def test_files_that_cannot_be(tmp_path):
    problem = random_problem(7, tensors=2)
    for name in ("step.pdf", "step"):
        with pytest.raises(ConfigError, match=r"expected \.png or \.svg or \.json"):
            picture(problem, problem.dense(), tmp_path / name)
    (tmp_path / "folder.svg").mkdir()
    for name in ("none/step.png", "none/step.json", "folder.svg"):
        with pytest.raises(ConfigError, match=r"--picture .*director"):
            picture(problem, problem.dense(), tmp_path / name)


def test_pictures_are_refused_before_anything_is_planned(tmp_path):
    """Not even the profile is read, and no plan is written."""
    with pytest.raises(ConfigError, match=r"--picture .*expected \.png or \.svg or \.json"):
        plan_main("no such profile", "lstm", output=tmp_path / "plan.json", picture=tmp_path / "step.gif")
