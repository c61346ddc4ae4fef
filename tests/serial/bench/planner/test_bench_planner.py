"""``bench planner`` and the report of it and of ``bench validate``; docs/planner.md fits the code."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from espresso_mpi.bench import report, validate
from espresso_mpi.bench.planner import cases as planner_cases
from espresso_mpi.bench.planner import distance as planner_distance
from espresso_mpi.bench.planner import paper as planner_paper
from espresso_mpi.bench.planner import suite as planner_suite
from espresso_mpi.bench.planner import tables as planner_tables
from espresso_mpi.bench.planner import time as planner_time
from espresso_mpi.bench.planner.published import CALIBRATION, GAINS, SCALING, SELECTION, TEST, PublishedGain
from espresso_mpi.bench.planner.random_cases import enumerated, random_case
from espresso_mpi.bench.planner.rows import KINDS, Against, Cases, Gap, ScalingRow, Selection, read
from espresso_mpi.bench.planner.setups import Timer, one_core, setup, together, workload_of
from espresso_mpi.bench.validate_tables import Row
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.output import write_rows
from espresso_mpi.planner.model.cost import Prices, Shape, walk
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.search.algorithms import offload_gap
from espresso_mpi.planner.search.baselines import BASELINES
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.planner.workloads.models import MODELS, model_workload
from espresso_mpi.types import Collective, Decode, Encode, Plan, Route, Strategy

DOC = (Path(__file__).parents[4] / "docs" / "planner.md").read_text()


# --- all of it, small -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The JSON of a quick run, and what it printed."""
    path = tmp_path_factory.mktemp("bench") / "planner.json"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        planner_suite.main(quick=True, json=path)
    return path, out.getvalue()


def test_a_quick_run_has_every_part(measured):
    path, printed = measured
    result = json.loads(path.read_text())
    assert result["kind"] == "planner"
    assert {row["part"] for row in result["rows"]} == set(KINDS)
    for part in planner_tables.PARTS:
        assert part.title in printed


def test_what_was_found_keeps_its_promises(measured):
    """Bounds are below what they bound, the Upper Bound below every plan, our search not above the algorithms."""
    rows = read(json.loads(measured[0].read_text())["rows"])
    for row in rows:
        if isinstance(row, Gap):
            assert row.bound <= row.seconds <= row.algorithms * (1 + 1e-9)
            assert row.seconds <= row.dense * (1 + 1e-9)
        if isinstance(row, Cases):
            assert row.violations in (0, None)
        if isinstance(row, Against) and row.method == "upper bound":
            assert row.gain < 1e-6


def test_the_report_has_its_tables(measured, tmp_path):
    report.main(results=[measured[0]], output=tmp_path / "B.md")
    text = (tmp_path / "B.md").read_text()
    assert "## The planner" in text
    for part in planner_tables.PARTS:
        _, _, section = text.partition(f"### {part.title}\n")
        header = next(line for line in section.splitlines() if line.startswith("|"))
        assert header == "| " + " | ".join(part.table.header) + " |"
    widths = {line.count(" | ") for line in section.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert "Seconds grow as a power of the number of tensors" in text


def test_a_part_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="'speed'; expected some of selection, gap"):
        planner_suite.main(only="gap,speed")


# --- tables -----------------------------------------------------------------------------------------------------------


def selected(problem, decide, offload, method="search"):
    paper = SELECTION["bert-base"]
    return Selection("bert-base", "pcie-25g", "onebit", method, 206, 9, 4000, 5, 1.0, problem, decide, offload,
                     paper.decide, paper.offload)  # fmt: skip


@pytest.mark.parametrize(
    "problem, decide, offload, said",
    [
        (0.020, 0.100, 0.044, "yes"),
        (0.030, 0.100, 0.044, "decision only"),
        (0.000, 0.126, 0.001, "no"),
        (0.000, 0.001, 0.045, "no"),
        (0.690, 1.000, None, "yes"),
        (0.700, 1.000, None, "decision only"),
        (0.000, 1.700, None, "no"),
    ],
)
def test_times_are_held_against_the_paper(problem, decide, offload, said):
    """BERT-base: 125 + 44 ms, ours ten times their sum."""
    assert planner_tables.within_limit(selected(problem, decide, offload)) == said


def test_models_that_the_paper_has_not_have_no_limit():
    row = replace(selected(0, 9, None), paper_decide=None, paper_offload=None)
    assert planner_tables.within_limit(row) == planner_tables.allowed(row) == ""


def test_gaps_are_summed_up_by_their_geometric_mean():
    mean, worst = planner_tables.summary([0.02, 0.08])
    assert mean == pytest.approx((1.02 * 1.08) ** 0.5 - 1)
    assert worst == pytest.approx(0.08)


def test_the_papers_figures_are_of_what_we_have():
    assert set(SELECTION) <= set(MODELS)
    for one in (*GAINS, *SCALING):
        assert one.model in MODELS
    assert {gain.baseline for gain in GAINS} <= set(BASELINES)
    assert {method for methods in planner_paper.METHODS.values() for method in methods} <= set(BASELINES)
    assert [g.percent for g in GAINS if g.model == "ugatit"] == [149, 205, 50, 35]


# --- random cases -----------------------------------------------------------------------------------------------------


def test_enumeration_finds_the_least():
    """Against the obvious enumeration in Python."""
    rng = np.random.default_rng(3)
    for _ in range(10):
        problem = random_case(rng, 4, 4)
        best, _ = enumerated(problem)
        found = planner_cases.least(problem.timeline, [list(problem.options(i)) for i in range(4)])
        assert found + problem.around == pytest.approx(best, rel=1e-12)


def test_offload_agrees_with_the_algorithms_own_comparison():
    """Which goes through all combinations: the same cases, the same gap."""
    (row,) = planner_cases.offloaded(12, lambda: None, seed=5)
    cases = planner_cases._compressing(np.random.default_rng(5), 12, "schedule")
    own = offload_gap(problem for problem, _ in cases)
    assert (row.cases, row.worst, row.mean) == pytest.approx((own.cases, own.worst, own.mean), abs=1e-9)
    assert row.optimal == pytest.approx(1 - own.above / own.cases)
    assert row.violations is None


# --- time and scaling -------------------------------------------------------------------------------------------------


def test_repetitions_end():
    calls = []
    result, seconds, repeats = Timer(least=2, most=7, seconds=60.0)(lambda: calls.append(1) or len(calls))
    assert result == repeats == len(calls) == 7
    assert seconds >= 0
    assert Timer(least=2, most=7, seconds=0.0)(lambda: 0)[2] == 2


def test_one_core_is_given_back():
    os = pytest.importorskip("os")
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity here")
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_synthetic_models_keep_sizes_order_and_work():
    real = workload_of("lstm")
    twice = planner_time.synthetic(real, 20)
    assert [t.size for t in twice.tensors] == [size for t in real.tensors for size in (t.size, t.size)]
    assert twice.tensors[-1].ready == pytest.approx(2 * real.tensors[-1].ready)
    half = planner_time.synthetic(real, 5)
    assert [t.size for t in half.tensors] == [t.size for t in real.tensors[::2]]
    sizes = [t.size for t in planner_time.synthetic(real, 300, different=True).tensors]
    assert len(set(sizes)) == 300
    assert max(sizes) < real.tensors[0].size * 1.01 + max(t.size for t in real.tensors)


def test_a_power_law_is_found():
    rows = [ScalingRow("tensors", "", n, 1e-4 * n**1.5, 1e-3 * n, 0.0, 3) for n in (10, 100, 300, 1000)]
    assert planner_tables.exponent(rows, lambda row: row.problem) == pytest.approx(1.5)
    assert "candidates 1.50, decision 1.00" in planner_tables.scaling_notes(rows)[0]
    assert planner_tables.scaling_notes(rows[:2]) == []


def test_scaling_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [ScalingRow(a, "", n, 1e-4 * n, 1e-3 * n, 0.0, 3) for a in ("tensors", "options") for n in (10, 100)]
    planner_time.draw(rows, tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_a_reason_is_what_the_run_shows():
    """The LSTM's step by HiPress: a published gain near ours, above all that is possible, below ours, and between."""
    at = setup("lstm", "pcie-25g", "onebit")
    most, ours = (100 * (at.by("hipress") / seconds - 1) for seconds in (at.compute, at.found.seconds))

    def against(percent):
        return planner_paper.against(PublishedGain("lstm", "onebit", "pcie-25g", "hipress", percent))

    assert against(ours + 5).reason == "within 10 points"
    assert against(1000).reason.startswith(f"at most {most:.0f} % here")
    assert against(ours - 30).reason.startswith("in buffers of 25 MiB the gain is")
    assert planner_paper.reason(at, replace(against(ours + 12), compute=at.compute / 2)) == "open"


def test_figures_that_descriptions_were_tuned_to_are_no_tests(measured):
    """The testbeds were set for scaling factors; the steps, which are measured, for no gain."""
    rows = read(json.loads(measured[0].read_text())["rows"])
    used = {}
    for part in planner_tables.PARTS:
        header = part.table.header
        if "use" in header:
            use, published = header.index("use"), header.index("published")
            lines = part.table.lines([row for row in rows if row.part == part.name])
            used[part.name] = {line[use] for line in lines if line[published] != "–"}
    assert used == {"paper": {TEST}, "factors": {CALIBRATION}}


# --- the distance from the Upper Bound --------------------------------------------------------------------------------


def test_routes_that_compress_inside_nodes_are_known():
    for text, inside in [
        ("allreduce@flat", False),
        ("encode@cpu/allgather@flat/decode@cpu", True),
        ("reduce_scatter@intra/encode@cpu/allgather@inter/decode@cpu/allgather@intra", False),
        ("reduce_scatter@intra/encode@cpu/alltoall@inter/allgather@inter/allgather@intra/decode@cpu", True),
    ]:
        assert planner_distance.compresses_inside(Route.parse(text)) == inside, text


def test_the_greedy_choice_spends_the_gpu_while_the_network_is_short():
    """BERT: with fewer candidates Algorithm 1 ends nearer to the bound: less of the GPU went into compressing."""
    row = planner_distance.distance(workload_of("bert-base"), TESTBEDS["nvlink-100g"].profile(), "onebit")
    assert row.between < row.usual and row.gpu_between < row.gpu
    assert row.upper <= row.bound * (1 + 1e-9) <= row.search * (1 + 1e-9)
    assert row.search <= min(row.usual, row.between)
    assert row.search <= row.earliest * 1.005


def test_the_fitted_backward_pass_scales_as_published():
    profile = TESTBEDS["nvlink-100g"].profile()
    backward = planner_distance.fitted("gpt2", profile, "dgc:ratio=0.01", 0.58)
    row = planner_distance.distance(model_workload("gpt2", backward=backward), profile, "dgc:ratio=0.01")
    assert row.factor == pytest.approx(0.58, abs=0.002)


def test_neighbours_of_one_strategy_share_buffers():
    workload = workload_of("lstm")
    dense, packed = Strategy("none", "flat"), Strategy("onebit", "flat-allgather")
    names = [t.name for t in workload.tensors]
    plan = Plan({name: packed if name == names[4] else dense for name in names})
    groups = together(plan, workload, sum(t.nbytes for t in workload.tensors) + 1)
    assert groups == (tuple(names[:4]), tuple(names[5:]))
    assert together(plan, workload, 1) == ()


# --- validate ---------------------------------------------------------------------------------------------------------


def test_predictions_stand_beside_what_was_measured(tmp_path):
    rows = [
        Row(5, "sync", "auto", 0.011, 0.010, 0.012, 0.004, 0.005, True, 1.0, "1 x fp16 along flat"),
        Row(5, "sync", "fp32", 0.015, 0.020, 0.021, 0.004, 0.005, False, 2.0, "all dense"),
        Row(60, "push", "auto", 0.013, 0.020, 0.014, 0.004, 0.008, True, 1.25),
        Row(60, "push", "fp32", 0.020, 0.016, 0.021, 0.004, 0.010, False, 1.0),
    ]
    write_rows(tmp_path / "validate.json", rows, kind="validate", more="is ignored")
    report.main(results=[tmp_path / "validate.json"], output=tmp_path / "B.md")
    text = (tmp_path / "B.md").read_text()
    assert "## Predicted and measured steps" in text
    assert "| 5 | sync | auto | 11.00 | 10.00 | 12.00 | 10.0 % | 1.00 | chosen | 1 x fp16 along flat |" in text
    assert "| 5 | sync | fp32 | 15.00 | 20.00 | 21.00 | -25.0 % | 2.00 |  | all dense |" in text
    assert "| 5 | sync | 2 | 17.5 % | 25.0 % | -7.5 % | 1.25 | 1.00 | auto |" in text
    assert "| 60 | push | 2 | 30.0 % | 35.0 % | -5.0 % | 2.25 | 1.25 | fp32 |" in text
    assert "| all |  | 4 | 25.0 % | 35.0 % | -7.5 % | 1.62 | 1.12 |  |" in text


def test_validate_takes_medians_over_the_steps_of_each_method():
    computing, steps = np.array([[1, 2], [9, 2], [2, 2]]), np.array([[5, 8], [90, 4], [6, 6]])
    plans = {name: Plan(default=Strategy("none", Route.parse("flat"))) for name in ("auto", "fp32")}
    rows = validate.rows_of(
        validate.Case(5, "push"), 2.0, np.array([computing, steps]), {"auto": 7.0, "fp32": 9.0}, plans
    )
    assert [(r.method, r.predicted, r.measured, r.computing, r.chosen) for r in rows] == [
        ("auto", 7.0, 6.0, 2.0, True),
        ("fp32", 9.0, 6.0, 2.0, False),
    ]
    assert rows[0].p90 == pytest.approx(73.2)


@pytest.mark.parametrize(("tensors", "calls"), [("5,6", "sync"), ("5", "sync,pull"), ("", "sync")])
def test_validate_refuses_cases_that_there_are_not(tensors, calls):
    with pytest.raises(ConfigError, match="expected a comma list of"):
        validate._cases(tensors, calls)


# --- the page ---------------------------------------------------------------------------------------------------------


def sizes_by_the_table(route, n, payload, members):
    """What each operation of a route is priced for, by the page's table: ("encode", elements, times) or (bytes,)."""
    divisor, parts, copies, packed, scattered = 1, 1, 1, False, set()
    found = []
    for position, step in enumerate(route.steps):
        elements = -(-n // (divisor * parts))
        if isinstance(step, Encode):
            later = list(takewhile(lambda s: isinstance(s, Collective), route.steps[position + 1 :]))
            parts = math.prod(members[s.level] for s in later if s.op in ("alltoall", "reduce_scatter"))
            found.append(("encode", -(-n // (divisor * parts)), parts))
            copies, packed = 1, True
        elif isinstance(step, Decode):
            found.append(("decode", elements, parts * copies))
            parts, copies, packed = 1, 1, False
        else:
            p = members[step.level]
            if p > 1:
                found.append((copies * parts * payload(elements) if packed else 4 * -(-n // divisor),))
            if step.op in ("reduce_scatter", "alltoall"):
                divisor *= p
                parts = parts // p if packed else 1
                scattered.add(step.level)
            if step.op == "allgather" and step.level in scattered:
                divisor //= p
                parts *= p if packed else 1
            elif step.op in ("alltoall", "gather", "allgather"):
                copies *= p
    return found


@pytest.mark.parametrize("nodes, ranks", [(2, 3), (4, 1)])
def test_the_pages_table_of_sizes_is_what_routes_cost(nodes, ranks):
    """Every route of one device, with those that sum payloads."""
    members = {"flat": nodes * ranks, "intra": ranks, "inter": nodes}
    method, n = get("int8"), 100_003
    prices = Prices(TESTBEDS["pcie-25g"].profile(), n, method.at(None))
    for route in routes(("cpu",), linear=True):
        found = []
        for slot in walk(route, Shape(nodes, ranks, "cpu")):
            if slot.kind == "move":
                found.append((prices.nbytes(slot),))
            else:
                found.append((slot.kind, prices._elements(slot), slot.parts * slot.copies))
        assert found == sizes_by_the_table(route, n, method.nbytes, members), str(route)


def test_every_file_that_the_page_names_is_there():
    root = Path(__file__).parents[4]
    for target in re.findall(r"\]\(([^)#]+\.md)", DOC):
        assert (root / "docs" / target).resolve().exists(), target
    for path in re.findall(r"`(espresso_mpi/[\w/]+\.py)`", DOC):
        assert (root / path).exists(), path
