"""The recorder, the file of a trace, clocks, and the picture: all without MPI."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from espresso_mpi.cli.program import app
from espresso_mpi.collectives.messages import clocks
from espresso_mpi.errors import ConfigError, StateError
from espresso_mpi.tracing import pictures, recording, trace_file
from espresso_mpi.tracing.ledger import Ledger, LedgerInterval
from espresso_mpi.tracing.recording import Recorder, Span
from espresso_mpi.tracing.trace_file import RankTrace

# --- recorder ---------------------------------------------------------------------------------------------------------


def two_steps(recorder):
    """Two steps of tensor a, one of b, and what concerns both; times are exact in binary."""
    recorder.add("check", "", 0, 0, 0.0, 0.5)
    for step, start in ((0, 1.0), (1, 10.0)):
        recorder.add("encode", "a", step, 0, start, start + 0.25, "encode@cpu")
        recorder.add("wait", "a", step, 0, start + 0.5, start + 0.75, "alltoall@inter", "inter")
        recorder.add("wire", "a", step, 0, start + 0.25, start + 1.0, "alltoall@inter", "inter", 3, 40)
        recorder.add("decode", "a", step, 0, start + 1.0, start + 1.5 + step)
    recorder.add("wire", "b", 0, 0, 20.0, 20.125, "allreduce@flat", "flat", 7)


def test_sums_by_tensor_and_of_the_last_step():
    recorder = Recorder()
    two_steps(recorder)
    a, b = recorder.tensors({"a": 2.5}).values()
    assert (a.steps, a.residual_norm) == (2, 2.5)
    assert a.seconds_by == {"encode": 0.5, "wire": 1.5, "decode": 2.0, "wait": 0.5}
    assert a.bytes_by_level == {"intra": 6, "inter": 80}
    assert a.last.step == 1
    assert a.last.seconds_by == {"encode": 0.25, "wire": 0.75, "decode": 1.5, "wait": 0.25}
    assert a.last.bytes_by_level == {"intra": 3, "inter": 40}
    assert (b.steps, b.residual_norm, b.last.seconds_by["wire"]) == (1, None, 0.125)
    for kind in recording.TENSOR_KINDS:
        assert recorder.seconds[kind] == a.seconds_by[kind] + b.seconds_by[kind]
    assert recorder.seconds["check"] == 0.5


INTERVALS = (
    LedgerInterval("agree", "", 0, 1, share=(0.0, 1.0)),
    LedgerInterval("encode", "a", 1, 2),
    LedgerInterval("wire", "a", 2, 3, "alltoall@flat", "flat", 3, 40, (0.0, 0.25)),
    LedgerInterval("wire", "b", 2, 3, "alltoall@flat", "flat", 9, 0, (0.25, 1.0)),
)
"""Of a table with two tensors; the whole wait is the call's, and each tensor has its share."""


@given(
    st.lists(st.sampled_from(["both", "both", "both", "ordinary", "asked", "reloaded"]), min_size=1, max_size=150),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_ledger_adds_up_to_what_single_reports_do(events, traced):
    """Whatever is reported, asked or loaded in between, and more often than a ledger has room for."""
    single, summed = Recorder(), Recorder()
    ledgers = [Ledger(summed, INTERVALS, 4) for _ in range(2)]
    step = 0
    if traced:
        for recorder in (single, summed):
            recorder.start()
    for number, event in enumerate(events):
        if event == "asked":
            same_sums(single, summed)
        if event == "reloaded":
            step = 0
            single.rewind()
            summed.rewind()
        if event == "ordinary":
            for recorder in (single, summed):
                recorder.add("decode", "a", step, 0, 0.0, 0.5, nbytes_intra=2)
            step += 1
        if event != "both":
            continue
        at = 1000 * 2**30 * number
        ledger = ledgers[number % 7 == 0]
        ledger.row[:] = [(at + k * 2**30 + k * k, 2**30 * k // 2) for k in range(4)]
        times = (ledger.row * 1e-9).tolist()
        for one in INTERVALS:
            (start, before), (stop, after) = times[one.first], times[one.last]
            share = one.share or (0.0, 0.0)
            waited = start + share[0] * (after - before), start + share[1] * (after - before)
            its = step + 5 * (one.tensor == "b") if one.tensor else 0
            if one.share is not None:
                single.add("wait", one.tensor, its, 0, *waited, one.what, one.level)
            single.add(one.kind, one.tensor, its, 0, start, stop, one.what, one.level, one.intra, one.inter)
        ledger.note((step, step + 5))
        step += 1
    assert single.stop() == summed.stop()
    same_sums(single, summed)


def same_sums(one, other):
    """Equal steps and bytes; seconds up to rounding."""
    assert one.seconds == pytest.approx(other.seconds)
    first, second = one.tensors(), other.tensors()
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert (a.steps, a.bytes_by_level, a.last.step) == (b.steps, b.bytes_by_level, b.last.step)
        assert a.last.bytes_by_level == b.last.bytes_by_level
        assert a.seconds_by == pytest.approx(b.seconds_by)
        assert a.last.seconds_by == pytest.approx(b.last.seconds_by)


def test_a_late_span_counts_for_the_sums_alone():
    recorder = Recorder()
    recorder.add("encode", "a", 5, 0, 0.0, 1.0)
    recorder.add("decode", "a", 4, 1, 0.0, 2.0, nbytes_intra=8)
    stats = recorder.tensors()["a"]
    assert (stats.steps, stats.last.step, stats.last.seconds_by["decode"]) == (1, 5, 0.0)
    assert stats.seconds_by["decode"] == 2.0
    assert stats.bytes_by_level["intra"] == 8


def test_after_rewind_steps_may_go_back():
    recorder = Recorder()
    recorder.add("encode", "a", 5, 0, 0.0, 1.0)
    recorder.rewind()
    recorder.add("encode", "a", 2, 0, 0.0, 4.0)
    stats = recorder.tensors()["a"]
    assert (stats.steps, stats.last.step, stats.last.seconds_by["encode"]) == (2, 2, 4.0)
    assert stats.seconds_by["encode"] == 5.0


def test_statistics_are_values_that_stay():
    recorder = Recorder()
    two_steps(recorder)
    before = recorder.tensors()
    text = repr(before)
    recorder.add("encode", "a", 1, 0, 0.0, 1.0)
    assert repr(before) == text


def test_spans_are_kept_only_while_tracing():
    recorder = Recorder()
    two_steps(recorder)
    assert recorder.stop() == ([], 0)
    recorder.start()
    two_steps(recorder)
    assert recorder.rows()["a", 1].seconds_by["decode"] == 1.5
    spans, dropped = recorder.stop()
    recorder.add("encode", "a", 9, 0, 0.0, 1.0)
    assert (len(spans), dropped) == (10, 0)
    assert spans[3] == Span("wire", "a", 0, 0, 1.25, 2.0, "alltoall@inter", "inter", 43, 40)
    assert recorder.stop() == ([], 0)


def test_rows_are_the_sums_by_tensor_and_step():
    recorder = Recorder()
    recorder.start()
    two_steps(recorder)
    rows = recording.rows(recorder.stop()[0])
    assert list(rows) == [("a", 0), ("a", 1), ("b", 0)]
    for name, stats in recorder.tensors().items():
        mine = [row for (tensor, _), row in rows.items() if tensor == name]
        assert mine[-1] == stats.last
        for kind in recording.TENSOR_KINDS:
            assert sum(row.seconds_by[kind] for row in mine) == stats.seconds_by[kind]
        for level in ("intra", "inter"):
            assert sum(row.bytes_by_level[level] for row in mine) == stats.bytes_by_level[level]


def test_what_there_is_no_room_for_is_counted():
    recorder = Recorder()
    recorder.start(limit=4)
    two_steps(recorder)
    spans, dropped = recorder.stop()
    assert (len(spans), dropped) == (4, 6)
    recorder.start()
    assert recorder.stop() == ([], 0)


def test_tracing_twice_is_refused():
    recorder = Recorder()
    recorder.start()
    with pytest.raises(StateError, match="being traced already"):
        recorder.start()


def test_timing_counts_a_block_that_fails():
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.timing("agree"):
        raise KeyError
    assert recorder.seconds["agree"] > 0


def test_threads_may_report_at_once():
    recorder = Recorder()

    def report(name):
        for step in range(2000):
            recorder.add("wire", name, step, 0, 0.0, 1.0, nbytes_inter=1)
            recorder.add("wire", "shared", 0, 0, 0.0, 1.0, nbytes_inter=1)

    threads = [threading.Thread(target=report, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.seconds["wire"] == 16000
    assert recorder.tensors()["shared"].bytes_by_level["inter"] == 8000


def test_no_mpi_is_loaded():
    code = "import sys, espresso_mpi.tracing.trace_file; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- the file ---------------------------------------------------------------------------------------------------------


def check_trace_events(content):
    """The rules of the format that viewers depend on, by a reading of our own: returns the events by thread."""
    content = json.loads(json.dumps(content, allow_nan=False))
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    threads, processes, by_thread = {}, {}, defaultdict(list)
    for event in content["traceEvents"]:
        assert event["pid"] >= 1 and event["tid"] >= 1
        if event["ph"] == "M":
            assert "ts" not in event
            if event["name"] == "thread_name":
                assert event["tid"] not in threads, "a thread is named twice"
                threads[event["tid"]] = event["pid"], event["args"]["name"]
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert event["cat"] in recording.KINDS
            assert event["name"]
            by_thread[event["tid"]].append(event)
    assert len({name for _, name in threads.values()}) == len(threads)
    for tid, events in by_thread.items():
        assert {event["pid"] for event in events} == {threads[tid][0]}
        assert threads[tid][0] in processes
        check_nesting(events)
    return {threads[tid][1]: by_thread[tid] for tid in threads}, processes


def check_nesting(events):
    """Two events of a thread lie apart, or one within the other; compared in whole nanoseconds."""
    ends = [
        (round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000), e["cat"])
        for e in sorted(events, key=lambda e: (e["ts"], -e["dur"], e["cat"] == "wait"))
    ]
    under_way = []
    for start, stop, kind in ends:
        while under_way and under_way[-1] <= start:
            under_way.pop()
        if under_way:
            assert stop <= under_way[-1]
            assert kind == "wait"
        under_way.append(stop)


def rank_trace(spans, rank=0, node=0, hostname="node0", dropped=0):
    return RankTrace(rank, node, hostname, tuple(spans), dropped)


def test_tracks_names_and_arguments():
    spans = [
        Span("encode", "a", 3, 0, 1.0, 1.001, "encode@cpu"),
        Span("wire", "a", 3, 0, 1.001, 1.004, "alltoall@inter", "inter", 43, 40),
        Span("encode", "b", 3, 1, 1.001, 1.003, "encode@cpu"),
        Span("wire", "b", 3, 1, 1.003, 1.005, "alltoall@inter", "inter", 9, 9),
        Span("wait", "a", 3, 0, 1.0035, 1.004, "alltoall@inter", "inter"),
        Span("agree", "", 0, 0, 0.999, 1.0),
    ]
    other = [Span("encode", "a", 3, 0, 1.0, 1.001, "encode@cpu")]
    content = trace_file.chrome([rank_trace(spans), rank_trace(other, 1, 1, "node1"), rank_trace([], 2, 1, "node1")])
    tracks, processes = check_trace_events(content)
    assert processes == {1: "node 0 (node0)", 2: "node 1 (node1)"}
    assert list(tracks) == [
        "rank 0 cpu", "rank 0 wire", "rank 0 wire 2", "rank 1 cpu", "rank 1 wire", "rank 2 cpu", "rank 2 wire",
    ]  # fmt: skip
    assert [e["name"] for e in tracks["rank 0 cpu"]] == ["encode@cpu a", "encode@cpu b", "agree"]
    assert [e["name"] for e in tracks["rank 0 wire"]] == ["alltoall@inter a", "wait a"]
    assert [e["name"] for e in tracks["rank 0 wire 2"]] == ["alltoall@inter b"]
    assert tracks["rank 2 cpu"] == []
    first, _ = tracks["rank 0 wire"]
    assert (first["ts"], first["dur"], first["cat"]) == (2000.0, 3000.0, "wire")
    assert first["args"] == {
        "rank": 0, "tensor": "a", "step": 3, "segment": 0, "what": "alltoall@inter", "level": "inter", "bytes": 43,
        "bytes_intra": 3, "bytes_inter": 40,
    }  # fmt: skip
    (agree,) = [e for e in tracks["rank 0 cpu"] if e["cat"] == "agree"]
    assert (agree["ts"], agree["args"]) == (0.0, {"rank": 0})


def test_waits_of_an_agreement_lie_in_it():
    spans = [Span("agree", "", 0, 0, 0.0, 1.0), Span("wait", "", 0, 0, 0.25, 0.5)]
    tracks, _ = check_trace_events(trace_file.chrome([rank_trace(spans)]))
    assert [e["cat"] for e in tracks["rank 0 cpu"]] == ["agree", "wait"]


def test_a_trace_without_spans_is_a_file_with_names():
    tracks, _ = check_trace_events(trace_file.chrome([rank_trace([])]))
    assert tracks == {"rank 0 cpu": [], "rank 0 wire": []}


instants = st.integers(0, 40)
many_spans = st.lists(
    st.builds(
        lambda kind, tensor, step, a, b, sent: Span(
            kind, tensor, step if tensor else 0, 0, 5 + min(a, b) / 1e9, 5 + max(a, b) / 1e9,
            "x@flat" if tensor else "", "flat" if kind == "wire" and tensor else "",
            sent if kind == "wire" else 0, sent // 2 if kind == "wire" else 0,
        ),
        st.sampled_from(recording.KINDS), st.sampled_from(["", "a", "b"]), st.integers(0, 2), instants, instants,
        st.integers(0, 9),
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(many_spans, many_spans)
def test_any_spans_make_a_legal_file_that_reads_back(tmp_path_factory, mine, other):
    ranks = [rank_trace(mine), rank_trace(other, 1, 1, "node1", dropped=2)]
    content = trace_file.chrome(ranks, {"note": "said"})
    check_trace_events(content)
    path = tmp_path_factory.mktemp("trace") / "t.json"
    trace_file.write(path, content)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content))
    read = trace_file.read(path)
    zero = min((recording.nanoseconds(s.start) for s in mine + other), default=0)
    for before, after in zip(ranks, read.ranks):
        assert (after.rank, after.node, after.hostname, after.dropped) == (
            before.rank, before.node, before.hostname, before.dropped,
        )  # fmt: skip
        assert sorted(map(whole, after.spans)) == sorted(whole(span, zero) for span in before.spans)


def whole(span, zero=0):
    """A span with its times in nanoseconds."""
    start, stop = (recording.nanoseconds(seconds) - zero for seconds in (span.start, span.stop))
    texts = (span.kind, span.tensor, span.step, span.segment, span.what, span.level)
    return (start, stop, *texts, span.nbytes, span.nbytes_inter)


@given(many_spans)
def test_spans_travel_as_json(spans):
    there = json.loads(json.dumps(recording.dump(spans)))
    assert recording.restore(there) == spans
    assert [s.start for s in recording.restore(there, lambda seconds: seconds + 1)] == [s.start + 1 for s in spans]


def test_writing_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("former")
    with pytest.raises(ValueError):
        trace_file.write(path, {"traceEvents": [{"ts": float("nan")}]})
    assert path.read_text() == "former"
    trace_file.write(path, trace_file.chrome([rank_trace([])]))
    assert trace_file.read(path).ranks[0].spans == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    trace_file.write(tmp_path / "link.json", trace_file.chrome([rank_trace([])]))
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").is_file()


@pytest.mark.parametrize("name, words", [("missing/t.json", "does not exist"), (".", "regular file")])
def test_a_place_that_cannot_be_written_is_refused_before(tmp_path, name, words):
    with pytest.raises(ConfigError, match=words):
        trace_file.refuse_unwritable(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_writing_where_the_directory_has_gone_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        trace_file.write(tmp_path / "gone" / "t.json", trace_file.chrome([]))


def test_a_good_place_is_left_as_it_was(tmp_path):
    (tmp_path / "t.json").write_text("former")
    trace_file.refuse_unwritable(tmp_path / "t.json")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("t.json", "former")]


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {"producer": "x"}}',
     '{"traceEvents": [{"ph": "X"}], "otherData": {"producer": "espresso_mpi", "ranks": []}}', "[" * 100000],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no trace of espresso_mpi"):
        trace_file.read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        trace_file.read(tmp_path / "t.json")


def test_runs_have_files_of_their_own(tmp_path):
    path = tmp_path / "step.json"
    assert trace_file.labelled(path, "topk:ratio=0.01, no feedback").name == "step-topk-ratio=0.01-no-feedback.json"
    assert trace_file.labelled(path, "fp32").parent == tmp_path


# --- clocks -----------------------------------------------------------------------------------------------------------


class Wire:
    """A transport between two clocks: messages take (there, back) seconds, and rank 0's clock is ``ahead``."""

    def __init__(self, ahead, delays):
        self.now, self.ahead, self.delays = 100.0, ahead, iter(delays)

    def exchange(self, sends, receives):
        there, back = next(self.delays)
        receives[0][1][0] = self.now + there + self.ahead
        self.now += there + back


def test_a_reading_is_wrong_by_half_a_round_trip_at_most():
    for there, back in ((0.0, 0.25), (0.25, 0.0), (0.125, 0.125), (0.01, 0.5)):
        wire = Wire(7.0, [(there, back)])
        reading = clocks._ask(wire, lambda wire=wire: wire.now)
        assert abs(reading.offset - 7.0) <= reading.round_trip / 2 + 1e-12
        assert reading.round_trip == pytest.approx(there + back)


def test_a_correction_joins_its_two_readings():
    correction = clocks.Correction(clocks.Reading(10.0, 5.0, 0.1), clocks.Reading(20.0, 6.0, 0.1))
    assert [correction(seconds) for seconds in (10.0, 15.0, 20.0, 30.0)] == [15.0, 20.5, 26.0, 37.0]
    same = clocks.Reading(10.0, 5.0, 0.1)
    assert clocks.Correction(same, same)(12.0) == 17.0


# --- the picture ------------------------------------------------------------------------------------------------------


def many(tensors=300, ranks=4, steps=(2, 3)):
    """A made-up trace: every tensor is encoded while the one before is on the wire."""
    found = []
    for rank in range(ranks):
        spans = []
        for step in steps:
            at = step + 0.0001 * rank
            spans.append(Span("check", "", 0, 0, at - 0.002, at - 0.001))
            spans.append(Span("agree", "", 0, 0, at - 0.001, at))
            for number in range(tensors):
                name, much = f"layer{number}.conv.weight", 0.2 / tensors
                spans.append(Span("encode", name, step, 0, at, at + much, "encode@cpu"))
                spans.append(Span("wire", name, step, 0, at + much, at + 2.5 * much, "x@inter", "inter", 1000, 1000))
                spans.append(Span("wait", name, step, 0, at + 2.2 * much, at + 2.5 * much, "x@inter", "inter"))
                at += much
        found.append(rank_trace(spans, rank, rank // 2, f"node{rank // 2}"))
    return found


@pytest.fixture
def trace_path(tmp_path):
    path = tmp_path / "step.json"
    trace_file.write(path, trace_file.chrome(many(), {"clocks": [{"node": 1, "known_within_s": 4e-5}]}))
    return path


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")])
def test_pictures_of_many_tensors(trace_path, suffix, magic, capsys):
    pytest.importorskip("matplotlib")
    output = trace_path.with_suffix(suffix)
    pictures.main(trace_path, output)
    assert output.read_bytes().startswith(magic)
    assert 20_000 < output.stat().st_size < 8_000_000
    assert "step 3: 4 ranks on 2 nodes, 300 tensors" in capsys.readouterr().out


def test_the_step_is_that_asked_for_with_what_led_to_it(trace_path):
    file = trace_file.read(trace_path)
    for asked, number in ((2, 2), (3, 3), (None, 3)):
        step = pictures.one_step(file, asked, trace_path)
        assert (step.number, step.tensors, step.clocks_within) == (number, 300, 4e-5)
        assert step.seconds == pytest.approx(0.002 + 0.201 + 0.0003, abs=0.002)
        for rank in step.ranks:
            assert [span.kind for span in rank.spans[:2]] == ["check", "agree"]
            assert len(rank.spans) == 2 + 3 * 300
            assert min(span.start for span in rank.spans) >= 0


def test_a_step_that_is_not_there_is_refused(trace_path):
    with pytest.raises(ConfigError, match="step 7 is not in it; it holds steps 2 to 3"):
        pictures.main(trace_path, trace_path.with_suffix(".svg"), 7)


def test_a_trace_without_steps_is_refused(tmp_path):
    path = tmp_path / "t.json"
    trace_file.write(path, trace_file.chrome([rank_trace([Span("agree", "", 0, 0, 0.0, 1.0)])]))
    with pytest.raises(ConfigError, match="holds no step"):
        pictures.main(path)


def test_runs_of_steps_are_described_in_short():
    assert pictures._described([1, 2, 3, 7, 9, 10]) == "steps 1 to 3, 7, 9 to 10"


@pytest.mark.parametrize("name, words", [("x.jpeg", "expected .png or .svg"), ("missing/x.png", "does not exist")])
def test_an_output_that_cannot_be_is_refused(trace_path, name, words):
    with pytest.raises(ConfigError, match=words):
        pictures.main(trace_path, trace_path.parent / name)


def test_without_matplotlib_the_extra_is_named(trace_path, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'espresso-mpi\[report\]'"):
        pictures.main(trace_path)


def test_rectangles_of_the_same_row_do_not_overlap(trace_path):
    step = pictures.one_step(trace_file.read(trace_path), None, trace_path)
    for number, rank in enumerate(step.ranks):
        bars = [bar for bar in pictures._bars(rank, number) if bar.kind != "wait"]
        assert all(number <= bar.top < bar.top + bar.height <= number + 1 for bar in bars)
        rows = defaultdict(list)
        for bar in bars:
            rows[bar.top].append((bar.start, bar.stop))
        assert len(rows) == 1 + 2  # of the wire two: one tensor follows the other before that is finished
        for row in rows.values():
            row.sort()
            assert all(a[1] <= b[0] + 1e-5 for a, b in itertools.pairwise(row))


def test_names_are_shortened_from_the_left_or_left_out():
    name = "block.7.conv.weight"
    assert pictures._fitting(name, 19) == name
    assert pictures._fitting(name, 18) == "…7.conv.weight"
    assert pictures._fitting(name, 12) == "…conv.weight"
    assert pictures._fitting(name, 11) == ""
    assert pictures._fitting("", 3) == ""


def test_time_on_the_wire_counts_once():
    spans = [Span("wire", "a", 0, 0, *ends) for ends in ((0.0, 2.0), (1.0, 1.5), (1.5, 3.0), (5.0, 6.0))]
    assert pictures._covered(spans) == 4.0


def test_the_command_draws_beside_the_trace(trace_path):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["timeline", str(trace_path), "--step", "2"])
    assert result.exit_code == 0, result.output
    assert "step 2: " in result.output
    assert trace_path.with_suffix(".svg").exists()


def test_the_option_of_the_benchmarks_is_checked_first(tmp_path):
    pictures.check_trace(None)
    pictures.check_trace(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="does not exist"):
        pictures.check_trace(tmp_path / "missing" / "t.json")
