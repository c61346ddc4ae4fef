"""``bench accuracy`` without ranks: its arguments, what its tables say, and seconds from step times."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi import Session
from espresso_mpi.bench import accuracy, accuracy_runs, accuracy_tables, accuracy_times, datasets, report
from espresso_mpi.bench.accuracy_times import StepTime
from espresso_mpi.bench.loss_curves import Point
from espresso_mpi.bench.optimizer_ways import Phases
from espresso_mpi.bench.optimizers import numbers
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.output import write_rows


def run(way, losses, seed=0, seconds=1.0, sent=1_000_000, **others):
    """Validated after each step; a step takes ``seconds`` and sends ``sent`` bytes."""
    curve = tuple(
        Point(step, step * seconds, {"intra": 0.0, "inter": float(step * sent)}, loss)
        for step, loss in enumerate(losses)
    )
    values = {
        "way": way, "seed": seed, "lr": 0.1, "loss": losses[-1], "diverged_at": None, "replicas_identical": True,
        "wall_seconds": 9.0, "curve": curve, "sent_by_step": (sent,) * (len(losses) - 1), **others,
    }  # fmt: skip
    return accuracy_runs.Run(**values)


RUNS = [
    run("gloo:none", (6.0, 3.0, 2.10, 1.9), 0, 4.0),
    run("gloo:none", (6.0, 3.0, 2.00, 2.1), 1, 4.0),
    run("gloo:fp16", (6.0, 3.0, 2.02, 2.0), 0, 2.0, 500_000),
    run("gradsync:int4", (6.0, 2.0, 1.90, 2.02), 0, 1.5, 125_000),
    run("gradsync:onebit", (6.0, 4.0, 3.00, 2.5), 0, 0.5, 30_000, replicas_identical=False),
    run("gradsync:topk", (6.0, None), 0, 0.5, 30_000, diverged_at=1, loss=None),
]
"""The target is 2.02 with a tolerance of 1 %: that of both seeds of fp32, which the mean curve meets at the end."""

SETTINGS = {"workload": "gpt", "steps": 4, "batch": 4, "eval_every": 1, "width": 64, "layers": 1, "dense_steps": 1,
            "every": 2, "lr": None}  # fmt: skip


def test_the_table_has_seconds_and_bytes_to_the_target_of_fp32():
    found = accuracy_tables.groups(RUNS, 1.0, SETTINGS)
    assert accuracy_tables.TABLE.lines(found) == [
        ["gloo:none", "2", "2.0000", "0.2000", "+0.00", "3", "12.0", "3.0", "4000.00", "976.6", "", "", "identical"],
        ["gloo:fp16", "1", "2.0000", "", "+0.00", "2", "4.0", "1.0", "2000.00", "488.3", "", "", "identical"],
        ["gradsync:int4", "1", "2.0200", "", "+1.00", "1", "1.5", "0.1", "1500.00", "122.1", "", "", "identical"],
        ["gradsync:onebit", "1", "2.5000", "", "+25.00", *["not reached"] * 3, "500.00", "29.3", "", "", "DIFFER"],
        ["gradsync:topk", "1", "diverged", "", "", *["not reached"] * 3, "500.00", "29.3", "", "", "identical"],
    ]
    assert accuracy_tables.summary(found) == (
        "gradsync:int4 reaches the target first, after 1.5 s; gloo:none takes 8.00 times as long; gloo:fp16 takes 2.67 "
        "times as long; gradsync:int4 sends least until then, 0.1 MB per rank."
    )


def test_it_is_said_where_a_baseline_wins_or_nothing_is_known():
    found = accuracy_tables.groups([*RUNS[:3], run("gradsync:int4", (6.0, 3.0, 2.0, 2.0), 0, 2.5)], 1.0, SETTINGS)
    said = accuracy_tables.summary(found)
    assert said.startswith(
        "gloo:fp16 reaches the target first, after 4.0 s; no smaller message pays here: gradsync:int4"
    )
    without = accuracy_tables.groups(RUNS[2:], 1.0, {})
    assert accuracy_tables.summary(without).startswith("No target")
    assert accuracy_tables.TABLE.lines(without)[0][4:8] == ["", "", "", ""]


def test_steps_are_priced_by_those_that_send_as_many_bytes():
    """Three kinds: dense, compressed with sizes that vary, local. Of each the later half counts."""
    sent = np.array([4e6, 4e6, 4e6, 4e6, 100e3, 0, 102e3, 0])
    seconds = np.array([9.0, 7.0, 2.0, 4.0, 5.0, 0.3, 0.5, 0.1])
    times = accuracy_times.step_times_of("diloco", sent, seconds)
    assert [(time.sent, time.seconds, time.steps) for time in times] == [(0, 0.1, 1), (101e3, 0.5, 1), (4e6, 3.0, 2)]
    lone = run("diloco", (6.0, 5.0, 4.0, 3.0, 2.0), sent_by_step=(4_000_000, 0, 99_000, 0))
    priced = accuracy_times.priced(lone, [*times, StepTime("gloo:none", 0.0, 99.0, 1)], 1)
    assert [point.seconds for point in priced.curve] == pytest.approx([0.0, 3.0, 3.1, 3.6, 3.7])
    assert [point.loss for point in priced.curve] == [point.loss for point in lone.curve]
    assert priced.computing == pytest.approx(3 * 0.1 / 0.7)
    assert accuracy_times.priced(lone, times, 3).computing == 1.0
    assert accuracy_times.priced(lone, times, None).computing is None
    assert accuracy_times.priced(lone, times[:2], 1) is None, "no dense step was timed"
    [group] = accuracy_tables.groups([priced], 1.0, SETTINGS)
    assert accuracy_tables.TABLE.lines([group])[0][-4:] == ["976.6", "32.2", "42.9", "identical"]


def test_ways_are_read_and_wrong_ones_refused():
    ways = accuracy_runs.ways_of("gradsync:topk:ratio=0.01,values=int4, diloco ,onebit-adam:int8,push:auto,diloco")
    assert [(way.kind, way.compressor) for way in ways] == [
        ("gradsync", "topk:ratio=0.01,values=int4"), ("diloco", "int4"), ("onebit-adam", "int8"), ("push", "auto"),
    ]  # fmt: skip
    (partly,) = accuracy_runs.ways_of("sync+dense_steps=9+dense=head*|embed*:onebit")
    assert (partly.kind, partly.compressor, partly.dense_steps) == ("sync", "onebit", 9)
    (routed,) = accuracy_runs.ways_of("demo+route=flat-allgather+sign=false:dct_topk")
    assert (routed.kind, routed.compressor, routed.options) == ("demo", "dct_topk", (("route", "flat-allgather"),))
    assert routed.choice is not None and routed.choice.options == (("sign", False),)
    for wrong in ("", "gradsync+dense_steps=x:int8", "gradsync+dense=:int8", "gloo+dense_steps=9:fp16",
                  "push+dense_steps=9:auto", "gloo:int8", "gradsync", "adamw", "gradsync:int9", "onebit-adam:int9",
                  "ef21:auto", "onebit-adam+route=flat-allgather:auto", "push+feedback=none:auto", "gloo+route=x:fp16",
                  "ef21+feedback=none:onebit", "demo+route=flat+route=flat-allgather", "sync+feedback=:int8",
                  "gradsync+every=3:int8", "diloco+warmup=3", "onebit-adam+lr=1", "diloco+every",
                  "clan+eps=1"):  # fmt: skip
        with pytest.raises(ConfigError, match=r"expected|torch has|known|names none"):
            accuracy_runs.ways_of(wrong)
    for none in ({"ways": ""}, {"seeds": ""}, {"seeds": "1,x"}):
        with pytest.raises(ConfigError, match=r"names none|numbers with commas"):
            accuracy.main(steps=2, comm=MPI.COMM_SELF, **none)
    assert numbers("--seeds", "2,0,2", int) == [2, 0]


def test_arguments_of_an_optimizer_make_its_run_and_the_short_one_that_is_timed():
    """A run that is only timed comes to all kinds of steps, whatever the arguments say."""
    given = (
        "diloco+every=4+momentum=0+lr=1:int8,zero-one-adam+warmup=90+double_every=none,streaming+fragments=3+delay=2"
    )
    local, adam, streaming = (way.choice for way in accuracy_runs.ways_of(given))
    usual = Phases(300, 60, 15)
    assert local.phases(usual) == Phases(300, 60, 4) and adam.phases(usual) == Phases(300, 90, 15)
    settings = accuracy_runs.AccuracySettings(**{**SETTINGS, "steps": 300, "dense_steps": 60, "every": 15})
    late = accuracy_runs.ways_of("muloco+delay=3")[0].choice
    said = [
        accuracy_runs.dense_of(spec, settings)
        for spec in (*given.split(","), "gradsync:int8", "momentum-sgd", "onebit-adam+warmup=auto", "gone",
                     "push+dense_steps=7:int8")
    ]  # fmt: skip
    assert said == [60, 90, 60, 0, 0, None, None, 7]
    waits = [
        accuracy_runs.waits_from(spec, settings) for spec in ("diloco", "streaming", "diloco+delay=1", "gloo:fp16")
    ]
    assert waits == [60, None, None, None]
    with Session(MPI.COMM_SELF, compressor="int8") as session:
        params = {"weight": np.zeros(8, np.float32)}
        made = local.make(params, session, local.phases(usual))
        assert (made.lr, made._every, made._momentum) == (1.0, 4, 0.0)
        policy = adam.make(params, session, adam.phases(usual))._rule._policy
        assert (policy.warmup, policy.double_every) == (90, None)
        short = streaming.make(params, session, streaming.phases(usual).shortened(7))
        assert short._every <= 2 and short._delay == 0
        assert late.make(params, session, late.phases(usual).shortened(6))._delay == 0
        assert accuracy_runs.Choice.of("diloco+lr=1e+0").make(params, session, usual).lr == 1.0
        plain = accuracy_runs.Choice.of("zero-one-adam+warmup_compressor=none+double_every=none")
        assert dict(plain.options) == {"warmup_compressor": "none", "double_every": None}
        plain.check(session, usual)
        with pytest.raises(ConfigError, match="every"):
            accuracy_runs.Choice.of("streaming+every=0").check(session, usual)
        with pytest.raises(ConfigError, match="warmup"):
            accuracy_runs.Choice.of("onebit-adam+warmup=-1").check(session, usual)


def test_only_runs_that_another_network_would_not_change_are_priced():
    runs = [*RUNS, run("gradsync:auto", (6.0, 2.0)), run("onebit-adam:auto@plan.json", (6.0, 2.0))]
    assert accuracy._chosen(runs, None, None) == RUNS
    assert accuracy._chosen(runs, "gloo:none", "1") == [RUNS[1]]
    for ways, seeds in (("gradsync:auto", None), ("onebit-adam:auto@plan.json", None), ("gloo:fp16", "7")):
        with pytest.raises(ConfigError, match="--curves"):
            accuracy._chosen(runs, ways, seeds)


def test_the_report_has_the_table_and_which_way_is_first(tmp_path):
    settings = {"workload": "gpt", "parameters": 3208704, "nodes": 2, "ranks": 2, "rate": "100mbit", "batch": 4,
                "steps": 3, "eval_every": 1, "curves_rate": "unlimited"}  # fmt: skip
    write_rows(tmp_path / "a.json", RUNS, kind="accuracy", settings=settings, step_times=[])
    report.main(results=[tmp_path / "a.json"], output=tmp_path / "B.md")
    said = (tmp_path / "B.md").read_text()
    assert "| gradsync:onebit | 1 | 2.5000 |" in said
    assert "runs made at unlimited, by step times measured here" in said
    assert "gradsync:int4 reaches the target first" in said


def test_images_have_noise_that_is_the_same_in_validation_and_new_in_training():
    pytest.importorskip("sklearn")
    one, other = datasets.Digits(), datasets.Digits()
    places = one.places[-3:]
    assert np.array_equal(one.validation(places)[0], other.validation(places)[0])
    (first, _), (second, _) = [[data.batches(2, 1, 5, 4) for data in (one, other)][i]() for i in (0, 1)]
    assert np.array_equal(first, second)
    assert first.shape == (4, 1, 8, 8) and first.dtype == np.float32
    shards = [{tuple(image.ravel()) for image in one._images[rank::2]} for rank in (0, 1)]
    assert len(one._images) + len(one.places) // datasets.Noise().copies == 1797
    assert len(shards[0] & shards[1]) < 10  # but for digits that are drawn alike


def test_without_its_packages_the_error_says_how_to_install_them(monkeypatch):
    monkeypatch.setattr(accuracy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch"):
        accuracy.main()
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        datasets.Digits()


def test_a_shortened_run_has_dense_steps_and_averages_as_well():
    phases = Phases(3000, 150, 60)
    assert phases.shortened(40) == Phases(40, 4, 17, long=True, brief=True)
    assert phases.shortened(3000) == phases
    assert Phases.usual(300) == Phases(300, 60, 15)
    for steps in range(1, 30):
        short = phases.shortened(steps)
        assert short.dense == min(4, max(1, steps // 3)) and short.every >= 1
        assert short.warmup == phases.warmup == "int4" and Phases.usual(steps).warmup == "int8"
        assert steps < 3 or short.dense + short.every < steps  # an average before the end
