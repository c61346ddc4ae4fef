"""What ``explain`` says about plans, and the two commands' main functions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_profile, random_workload
from typer.testing import CliRunner

from espresso_mpi.cli.plan import explain_main, plan_main
from espresso_mpi.cli.program import app
from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.planner.explain import explain, ms, sentence, short
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.planfile import load, save
from espresso_mpi.planner.workloads.models import model_workload
from espresso_mpi.timetable import Lanes, Schedule, Timetable
from espresso_mpi.types import Forecast, MadeFor, Outlook, Plan, Route, Strategy

DENSE, ONEBIT = Strategy("none", "hierarchical"), Strategy("onebit", Route.parse("flat-alltoall").on("gpu"))
PLAN = Plan(
    {"conv.weight": ONEBIT, "a": DENSE, "b": DENSE},
    groups=(("a", "b"),),
    fuse_bytes=0,
    made_for=MadeFor({}, 2, 4, "gpu", {"mpi": "Open MPI 5.0"}),
    forecast=Forecast(
        0.3, 0.25, 0.2, 0.4, 0.01, "backprop", "one-network", "all routes, no fusion, with onebit", 0.0,
        {"fp32": 0.45, "myopic onebit": 0.33, "myopic fp16": 0.36},
        (
            Outlook(("conv.weight",), 0.1, 0.0625, Strategy("onebit", "flat-allgather"), 0.002, 0.03),
            Outlook(("a", "b"), 0.01, 0.0),
        ),
        0.1,
    ),
)  # fmt: skip


def said(explanation):
    """All of it as one text, spaces counting once."""
    cells = [cell for table in explanation.tables for row in (table.header, *table.rows) for cell in row]
    return " ".join(" ".join([*explanation.words, *cells]).split())


@pytest.mark.parametrize(
    "part",
    [
        "3 tensors, 1 group of fused ones, in GPU memory, for 2 nodes of 4 ranks (mpi Open MPI 5.0)",
        "Predicted step: 300.0 ms. Computing takes 200.0 ms of it; synchronising adds 100.0 ms, its exposed time.",
        "No step is shorter than 250.0 ms (all routes, no fusion, with onebit): the gap is at most 20.00%.",
        "compression gains 100.0 ms, of which 10 ms is uncertain. The plan's error is 0.1",
        "order 'backprop' with lanes 'one-network'",
        "exposed: how much shorter the step would be",
        "runner-up: the best other strategy",
    ],
)
def test_the_whole_plan_in_words(part):
    assert part in said(explain(PLAN))


def test_the_whole_plan_in_tables():
    used, rivals, buffers = explain(PLAN).tables
    assert [row[:3] for row in used.rows] == [("2", "1", "none"), ("1", "0", "onebit")]
    assert rivals.rows == (("myopic onebit", "330.0", "+10.0%"), ("fp32", "450.0", "+50.0%"))
    assert buffers.rows[0] == (
        "conv.weight", "onebit: flat-alltoall @gpu", "100.0", "37.5", "62.5", "onebit: flat-allgather @cpu", "2", "30"
    )  # fmt: skip
    assert buffers.rows[1] == ("a and 1 more", "none: hierarchical", "10", "10", "0", "none", "0", "0")


@pytest.mark.parametrize(
    "part",
    [
        "conv.weight: compressed with onebit on the GPU, dealt out as payloads, a part to each rank, among all ranks, "
        "decoded on the GPU, compressed with onebit on the GPU, gathered as payloads by all among all ranks, decoded",
        f"As a route: onebit {ONEBIT.route}",
        "Its operations take 100.0 ms: 37.5 ms overlapped, 62.5 ms exposed.",
        "The runner-up makes the step 2 ms longer: compressed with onebit on the CPU, gathered",
        "Without compression it would make the step 30 ms longer.",
    ],
)
def test_one_tensor_in_words(part):
    assert part in said(explain(PLAN, "conv.weight"))


def test_one_tensor_of_a_group():
    text = said(explain(PLAN, "b"))
    assert "It travels in one buffer with 1 other: a." in text
    assert "The buffer's operations take 10 ms: 10 ms overlapped, 0 ms exposed." in text
    assert "no runner-up" in text
    assert "Without compression" not in text


def test_the_schedule_of_a_tensor():
    """As the lanes run it: what each does before, and how long an operation waits for that."""
    lanes = Lanes(0, 1, 2, 2, 0)
    schedule = Schedule(
        lanes,
        {
            "conv.weight": Timetable(0.0, 0.1, ("encode@gpu", "alltoall@flat"), (0, 2), (0.01, 0.05), ((0.15, 0.16),)),
            "a..b (2)": Timetable(0.1, 0.05, ("allreduce@intra", "allreduce@inter"), (2, 2), (0.02, 0.03),
                                  ((0.15, 0.21),)),
        },
    )  # fmt: skip
    plan = replace(PLAN, schedule=schedule)
    (table,) = explain(plan, "conv.weight").tables
    assert table.rows == (
        ("", "backward", "gpu", "0", "100.0", "", ""),
        ("1", "encode@gpu", "gpu", "150.0", "160.0", "50", "backward of a..b (2)"),
        ("1", "alltoall@flat", "intra+inter", "160.0", "210.0", "0", "allreduce@intra of a..b (2)"),
    )
    assert explain(plan, "b").tables[0].rows[-1][-2:] == ("40", "alltoall@flat of conv.weight")
    assert explain(plan).tables[2].rows == (
        ("gpu", "3 operations", "160.0", "0", "160.0"), ("intra+inter", "3 operations", "100.0", "150.0", "240.0")
    )  # fmt: skip


def test_why_nothing_is_compressed():
    dense = {"a": DENSE}
    forgone = Forecast(0.4, 0.3, 0.2, 0.4, 0.05, "fifo", "host", "all", 0.02)
    text = said(explain(Plan(dense, forecast=forgone)))
    assert "the best plan that compresses would gain 20 ms, which its noise of 50 ms could explain" in text
    useless = Forecast(0.4, 0.3, 0.2, 0.4, 0.0, "fifo", "host", "all")
    assert "compression gains nothing here" in said(explain(Plan(dense, forecast=useless)))


def test_plans_made_by_hand():
    text = said(explain(Plan({"w": ONEBIT})))
    assert "made by hand for any cluster" in text
    assert "nothing is predicted" in text
    assert "Nothing is predicted" in said(explain(Plan(default=ONEBIT), "anything"))


def test_a_tensor_that_there_is_not():
    with pytest.raises(PlanError, match=r"'conv.weights'.*did you mean 'conv.weight'\?"):
        explain(PLAN, "conv.weights")
    with pytest.raises(PlanError, match="expected one of 3 tensors"):
        explain(PLAN, "zzzzzz")


def test_every_route_is_a_sentence_of_its_own():
    every = [Strategy("fp16" if route.compressed else "none", route) for route in routes(("cpu",), linear=True)]
    assert len({sentence(strategy) for strategy in every}) == len(every)
    assert len({short(strategy) for strategy in every}) == len(every)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1234567, "123.5 ms"), (1.23456e-3, "1.23 ms"), (4.5e-6, "0.0045 ms"), (0, "0 ms")]
)
def test_milliseconds(seconds, text):
    assert ms(seconds) == text


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(20)
    random_profile(rng, compressors=(COMPRESSOR, "fp16")).save(tmp_path / "profile.json")
    random_workload(rng, 6, "cpu").save(tmp_path / "workload.json")
    return tmp_path


def test_plan_from_files_and_back(files, capsys):
    plan_main(str(files / "profile.json"), str(files / "workload.json"), "none,topk:ratio=0.01", files / "plan.json")
    out = capsys.readouterr().out
    assert "Predicted step" in out
    assert "byteps-compress topk" in out
    assert "against this plan" in out
    made = load(files / "plan.json")
    assert made.forecast.order == "schedule"
    explain_main(files / "plan.json")
    assert "slower by" in capsys.readouterr().out
    explain_main(files / "plan.json", "t3")
    assert capsys.readouterr().out.startswith("t3: ")


def test_the_plan_says_that_pushes_hide_less_than_the_workload_has(files, capsys):
    profile = Profile.load(files / "profile.json")
    for hidden, said in ((0.25, "pushes hide 25% of what they could, and computing takes 50% longer"), (1.0, "")):
        replace(profile, hidden=hidden, slowed=0.5 * (hidden < 1)).save(files / "profile.json")
        plan_main(str(files / "profile.json"), str(files / "workload.json"), "none")
        out = " ".join(capsys.readouterr().out.split())
        assert said in out and ("count as ready" in out) == bool(said)


def test_the_command_takes_a_measured_backward_pass(tmp_path):
    given = ["--profile", "pcie-25g", "--workload", "lstm", "--compressors", "none", "-o", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, ["plan", *given, "--backward", "7.5"])
    assert done.exit_code == 0, done.output
    assert load(tmp_path / "p.json").forecast.compute == pytest.approx(model_workload("lstm", backward=7.5).seconds)


def test_explain_needs_nothing_but_the_file(tmp_path, capsys):
    save(PLAN, tmp_path / "plan.json")
    explain_main(tmp_path / "plan.json")
    assert f"Digest {PLAN.digest[:12]}" in capsys.readouterr().out
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["digest"] == PLAN.digest


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"profile": "pcie-26g"}, "profile 'pcie-26g': there is no such file; expected one, or one of"),
        ({"workload": "vgg"}, "workload 'vgg': there is no such file; expected one, or one of"),
        ({"backward": 0.2}, "--backward 0.2 with the file .*workload.json'; expected the name of a model"),
        ({"workload": "lstm", "backward": 0.0}, "backward: got 0.0; expected seconds above 0"),
        ({"order": "lifo"}, "order 'lifo'; expected one of"),
        ({"lanes": "wide"}, "lanes 'wide'; expected one of"),
        ({"output": "nowhere/plan.json"}, "directory does not exist"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_done(files, more, message):
    given = {"profile": str(files / "profile.json"), "workload": str(files / "workload.json"), **more}
    if "output" in given:
        given["output"] = files / given["output"]
    with pytest.raises(ConfigError, match=message):
        plan_main(**given)
