"""Traces of several ranks in one file, on one clock; errors on all ranks; statistics that add up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from rank_errors import same_error, several

from espresso_mpi.bench import text, training
from espresso_mpi.collectives import traces
from espresso_mpi.collectives.messages import clocks
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.errors import ConfigError, MismatchError, RankTimeoutError, StateError
from espresso_mpi.tracing import recording, trace_file
from espresso_mpi.tracing.recording import Recorder

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture
def open_transport(world):
    """Opens transports, by default with every rank a node of its own, and closes them if the test passed."""
    opened = []

    def opener(nodes="apart", timeout=60.0):
        groups = [[rank] for rank in range(world.size)] if nodes == "apart" else nodes
        opened.append(Transport.open(world, TransportSettings(timeout, 0, nodes=groups), lambda notes: None))
        return opened[-1]

    yield opener
    for transport in opened:
        transport.close()


@pytest.fixture
def one_node(world):
    """Skips where the ranks cannot be taken for one node, as on an emulated cluster."""
    shared = world.Split_type(MPI.COMM_TYPE_SHARED)
    size = shared.size
    shared.Free()
    if size < world.size:
        pytest.skip("needs all ranks on one node")


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on every rank."""
    return Path(world.bcast(str(tmp_path)))


def skewed(rank, drift=0.0):
    """A clock that is an hour per rank behind, and fast by ``drift`` seconds per second and rank."""
    start = time.perf_counter()
    return lambda: time.perf_counter() + drift * rank * (time.perf_counter() - start) - 3600.0 * rank


def record(world, transport, path, clock=time.perf_counter, times=3, quiet=()):
    """Each rank reports two spans per step, and one that begins before all meet and ends after it."""
    recorder = Recorder()
    with traces.recording(recorder, transport, path, clock):
        for step in range(times):
            for rank in range(world.size):
                start = clock()
                world.Barrier()
                stop = clock()
                if transport.rank not in quiet:
                    recorder.add("wire", f"meeting {rank}", step, 0, start, stop, "allreduce@flat", "flat", rank, 100)
            if transport.rank not in quiet:
                recorder.add("encode", "w", step, transport.rank, clock(), clock(), "encode@cpu")
    return recorder


def read(world, path):
    """The file as every rank sees it: rank 0 reads."""
    content = world.bcast(path.read_text() if world.rank == 0 else None)
    return json.loads(content)


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_offsets_of_clocks_are_found(world, open_transport):
    reading = clocks.read(open_transport(), skewed(world.rank))
    assert abs(reading.offset - 3600.0 * world.rank) <= reading.round_trip / 2 + 1e-6
    assert (reading.round_trip > 0) == (world.rank > 0)


def test_ranks_of_one_node_share_a_clock(world, one_node, open_transport):
    reading = clocks.read(open_transport([list(range(world.size))]), skewed(world.rank))
    assert (reading.offset, reading.round_trip) == (0.0, 0.0)


@pytest.mark.mpi(min_size=3)
def test_the_first_rank_of_a_node_asks_for_all_of_it(world, one_node, open_transport, folder):
    """Nodes (0), (1, 2, …): a clock that a node shares is corrected on all of its ranks."""
    transport = open_transport([[0], list(range(1, world.size))])
    record(world, transport, folder / "t.json", skewed(min(world.rank, 1)))
    check_meetings(world, read(world, folder / "t.json"))


def check_meetings(world, content):
    """At every barrier there was a moment when all ranks were in it, whatever their clocks showed."""
    doubt = max(clock["known_within_s"] for clock in content["otherData"]["clocks"]) * 1e6
    by_meeting = {}
    for event in content["traceEvents"]:
        if event.get("cat") == "wire":
            key = event["args"]["tensor"], event["args"]["step"]
            by_meeting.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_meeting) == 3 * world.size
    for spans in by_meeting.values():
        assert len(spans) == world.size
        assert max(start for start, _ in spans) <= min(stop for _, stop in spans) + 2 * doubt + 1


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_spans_of_all_ranks_lie_on_one_clock(world, open_transport, folder, drift):
    path = folder / "t.json"
    record(world, open_transport(), path, skewed(world.rank, drift))
    content = read(world, path)
    assert all(clock["known_within_s"] < 1 for clock in content["otherData"]["clocks"])
    for clock in content["otherData"]["clocks"]:
        assert clock["offset_s"] == pytest.approx(3600.0 * clock["node"], abs=1)
    check_meetings(world, content)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_holds_every_rank_and_names_it(world, open_transport, folder):
    path = folder / "t.json"
    record(world, open_transport(), path)
    content = read(world, path)
    names = {e["args"]["name"] for e in content["traceEvents"] if e["name"] in ("thread_name", "process_name")}
    assert {f"rank {r} {track}" for r in range(world.size) for track in ("cpu", "wire")} <= names
    assert sum(name.startswith("node ") for name in names) == world.size
    assert content["otherData"]["nodes"] == [[rank] for rank in range(world.size)]
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(events) == world.size * 3 * (world.size + 1)
    assert all(e["args"]["bytes"] == e["args"]["bytes_intra"] + 100 for e in events if e["cat"] == "wire")
    for rank in range(world.size):
        encodes = [e for e in events if e["cat"] == "encode" and e["args"]["rank"] == rank]
        assert [e["args"]["segment"] for e in encodes] == [rank] * 3
        assert {e["pid"] for e in encodes} == {rank + 1}


def test_ranks_of_a_node_are_threads_of_one_process(world, one_node, open_transport, folder):
    record(world, open_transport([list(range(world.size))]), folder / "t.json")
    events = read(world, folder / "t.json")["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert len({event["tid"] for event in events if event.get("cat") == "encode"}) == world.size


def test_a_rank_without_spans_is_in_the_file(world, open_transport, folder):
    quiet = world.size - 1
    record(world, open_transport(), folder / "t.json", quiet=(quiet,))
    content = read(world, folder / "t.json")
    assert all(event["args"]["rank"] != quiet for event in content["traceEvents"] if event["ph"] == "X")
    assert any(event["args"].get("name") == f"rank {quiet} cpu" for event in content["traceEvents"])


def test_spans_beyond_the_room_are_counted(world, open_transport, folder, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MAX_EVENTS", 2 * world.size)
    record(world, open_transport(), folder / "t.json")
    if world.rank == 0:
        file = trace_file.read(folder / "t.json")
        assert all(len(rank.spans) == 2 and rank.dropped == 3 * (world.size + 1) - 2 for rank in file.ranks)
        assert "left out" in caplog.text


def test_traces_follow_each_other(world, open_transport, folder):
    transport, path = open_transport(), folder / "t.json"
    for times in (1, 2):
        recorder = record(world, transport, path, times=times)
        assert not recorder.tracing
        events = read(world, path)["traceEvents"]
        assert sum(event.get("cat") == "encode" for event in events) == times * world.size


# --- errors -----------------------------------------------------------------------------------------------------------


def test_only_rank_0_writes_and_its_path_counts(world, open_transport, folder):
    """Rank 0 cannot write: all raise, before the block, and can go on."""
    transport, recorder = open_transport(), Recorder()
    path = folder / "missing" / "t.json" if world.rank == 0 else folder / "t.json"

    def enter():
        with traces.recording(recorder, transport, path):
            raise AssertionError("the block was entered")

    assert "does not exist" in same_error(world, ConfigError, enter)
    assert not recorder.tracing
    record(world, transport, folder / "t.json" if world.rank == 0 else folder / "missing" / "t.json")
    world.Barrier()
    assert (folder / "t.json").exists()


def test_what_fails_at_the_end_is_raised_on_all_ranks(world, open_transport, folder):
    transport, recorder = open_transport(), Recorder()
    gone = folder / "gone"
    if world.rank == 0:
        gone.mkdir()

    def run():
        with traces.recording(recorder, transport, gone / "t.json"):
            if world.rank == 0:
                gone.rmdir()

    assert "cannot be written" in same_error(world, ConfigError, run)
    record(world, transport, folder / "t.json")


def test_a_trace_within_a_trace_is_refused_on_all_ranks(world, open_transport, folder):
    """Also where one rank alone is being traced already."""
    transport, recorder = open_transport(), Recorder()
    if world.rank == world.size - 1:
        recorder.start()
    text = same_error(world, StateError, lambda: traces.begin(recorder, transport, folder / "t.json"))
    assert "traced already" in text and f"rank {world.size - 1}" in text


@several
def test_ranks_at_different_ends_of_a_trace_are_told(world, open_transport, folder):
    transport, recorder = open_transport(), Recorder()
    before = traces.begin(recorder, transport, folder / "t.json")

    def call():
        if world.rank == 0:
            traces.begin(Recorder(), transport, folder / "t.json")
        else:
            traces.finish(recorder, transport, folder / "t.json", before)

    with pytest.raises(MismatchError, match="is in another call"):
        call()


def test_an_exception_in_the_block_ends_the_trace(world, open_transport, folder):
    transport, recorder = open_transport(), Recorder()

    def run():
        with traces.recording(recorder, transport, folder / "t.json"):
            recorder.add("encode", "w", 0, 0, 0.0, 1.0)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert not recorder.tracing
    assert recorder.stop() == ([], 0)
    assert not (folder / "t.json").exists()
    record(world, transport, folder / "t.json")


@several
def test_a_rank_that_left_by_an_exception_is_named(world, folder):
    """The others wait no longer than the timeout. The transport is given up: nobody may close it together."""
    transport = Transport.open(
        world, TransportSettings(1.0, 0, nodes=[[rank] for rank in range(world.size)]), lambda notes: None
    )

    def run():
        with traces.recording(Recorder(), transport, folder / "t.json"):
            if world.rank == 1:
                raise KeyError

    with pytest.raises(KeyError if world.rank == 1 else RankTimeoutError) as caught:
        run()
    assert world.rank == 1 or "rank 1" in str(caught.value)
    assert not (folder / "t.json").exists()


# --- sessions ---------------------------------------------------------------------------------------------------------


def grads(rank, names=("a", "b", "c"), size=40_000):
    rng = np.random.default_rng(rank)
    return {name: rng.standard_normal(size).astype(np.float32) for name in names}


@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_sums_over_tensors_are_the_totals(world, open_session, compressor):
    session = open_session(compressor=compressor, route="flat" if compressor == "none" else "flat-alltoall")
    for _ in range(3):
        session.sync(grads(world.rank))
    stats = session.stats()
    if world.size > 1 and compressor == "onebit":
        assert set(stats.tensors) == {"a", "b", "c"}
        assert all(tensor.steps == 3 for tensor in stats.tensors.values())
    for kind in ("encode", "wire", "decode"):
        total = sum(tensor.seconds_by[kind] for tensor in stats.tensors.values())
        assert total == pytest.approx(stats.seconds_by[kind], rel=1e-9)
    for tensor in stats.tensors.values():
        assert tensor.seconds_by["wait"] <= tensor.seconds_by["wire"]


@several
def test_a_session_traces_its_steps(world, open_session, folder):
    session = open_session(compressor="onebit", route="flat-alltoall")
    session.sync(grads(world.rank))
    with session.trace(folder / "t.json"):
        for _ in range(2):
            session.sync(grads(world.rank))
    session.sync(grads(world.rank))
    if world.rank == 0:
        file = trace_file.read(folder / "t.json")
        assert file.steps == [1, 2]
        for rank in file.ranks:
            mine = recording.rows(rank.spans)
            assert set(mine) == {(name, step) for name in "abc" for step in (1, 2)}
            for row in mine.values():
                assert min(row.seconds_by[kind] for kind in ("encode", "wire", "decode")) > 0
                assert sum(row.bytes_by_level.values()) > 0
                assert row.seconds_by["wait"] <= row.seconds_by["wire"]
    world.Barrier()


@several
def test_the_file_says_what_the_statistics_say(world, open_session, folder):
    session = open_session(compressor="topk:ratio=0.1", route="flat-allgather")
    with session.trace(folder / "t.json"):
        for _ in range(2):
            session.sync(grads(world.rank))
    everyone = world.gather(dict(session.stats().tensors))
    if world.rank == 0:
        for rank in trace_file.read(folder / "t.json").ranks:
            for (name, step), row in recording.rows(rank.spans).items():
                stats = everyone[rank.rank][name]
                if step == stats.last.step:
                    assert row.bytes_by_level == stats.last.bytes_by_level
                    for kind, seconds in row.seconds_by.items():
                        assert seconds == pytest.approx(stats.last.seconds_by[kind], abs=1e-6, rel=1e-3)
    world.Barrier()


@several
def test_residual_norms_are_those_of_the_state(world, open_session):
    session = open_session(compressor="topk:ratio=0.1", route="flat-allgather")
    session.sync(grads(world.rank))
    state = session.state_dict()
    for name, tensor in session.stats(residuals=True).tensors.items():
        kept = [
            value for key, value in state["arrays"].items() if key.startswith(f"{name}|") and key.endswith("residual")
        ]
        squares = sum(float((value.astype(np.float64) ** 2).sum()) for value in kept)
        assert kept and tensor.residual_norm == pytest.approx(np.sqrt(squares), rel=1e-5)


@several
def test_bench_train_traces_without_counting_it(world, folder):
    """The curve is the same with a trace as without, and every method has a file of its own."""
    corpus = text.load()
    shape = training.ModelShape(hidden=16)
    options = training.TrainingSettings(steps=7, batch=8, eval_every=3, rate=0.5, shape=shape)
    for name in ("none", "onebit"):
        plain, traced = (
            training.train(world, corpus, training.Method(name), options, lambda step: None, path)
            for path in (None, folder / "run.json")
        )
        assert [(p.step, p.loss, p.bytes_by_level) for p in traced.curve] == [
            (p.step, p.loss, p.bytes_by_level) for p in plain.curve
        ]
    if world.rank == 0:
        assert {path.name for path in folder.iterdir()} >= {"run-fp32.json", "run-onebit.json"}
        assert len(trace_file.read(folder / "run-onebit.json").steps) == training.TRACED
    world.Barrier()
