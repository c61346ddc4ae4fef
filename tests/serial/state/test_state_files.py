"""States without MPI: several ranks as threads, memories made by hand, against sums in float64."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from espresso_mpi import compressors
from espresso_mpi.arrays import device
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.collectives.messages import agreement
from espresso_mpi.collectives.store_keys import Key
from espresso_mpi.compressors import Context
from espresso_mpi.errors import StateError
from espresso_mpi.options import Options
from espresso_mpi.state import folder, loading, snapshots
from espresso_mpi.state.store import StateStore, SyncState, Weights
from espresso_mpi.types import Plan, Strategy

N = 1000


@dataclass
class Rank:
    """As much of a Transport as loading a state needs: messages between threads."""

    rank: int
    topology: Topology
    mail: dict[tuple[int, int], queue.Queue]

    @property
    def node(self):
        return self.topology.nodes[self.topology.node_of[self.rank]]

    def describe(self, rank):
        return f"rank {rank} (host)"

    def exchange(self, sends, receives):
        for to, array in sends:
            self.mail[self.rank, to].put(array.copy())
        for source, array in receives:
            array[:] = self.mail[source, self.rank].get(timeout=20)


@pytest.fixture(autouse=True)
def _allgather_json_between_threads(monkeypatch):
    """How ranks compare notes is tested elsewhere."""

    def allgather_json(transport, text):
        ranks = range(transport.topology.size)
        for rank in ranks:
            transport.mail[transport.rank, rank].put(text)
        return [json.loads(transport.mail[rank, transport.rank].get(timeout=20)) for rank in ranks]

    monkeypatch.setattr(agreement, "allgather_json", allgather_json)


def on_ranks(nodes, act):
    """``act(transport)`` of all ranks at the same time: the results or errors, in rank order."""
    topology = Topology(tuple(tuple(group) for group in nodes))
    pairs = [(a, b) for a in range(topology.size) for b in range(topology.size)]
    mail = {pair: queue.Queue() for pair in pairs}
    results = [None] * topology.size

    def run(rank):
        try:
            results[rank] = act(Rank(rank, topology, mail))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(topology.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def loaded(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def refused(results, words):
    """All ranks refuse with the same text."""
    assert all(isinstance(result, StateError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert words in str(results[0]), str(results[0])


def options(**given):
    made, problem = Options.checked(**{"compressor": "onebit", **given})
    assert problem is None
    return made


TWO_BY_TWO = ((0, 1), (2, 3))
FLAT_THREE = ((0, 1, 2),)


def values(*seed, n=N):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def memory_of(rank, kind="residual"):
    """What a rank of 2 x 2 keeps along hierarchical-alltoall: half a tensor at the first encode, a quarter after."""
    node, lane = divmod(rank, 2)
    start, stop = lane * N // 2, (lane + 1) * N // 2
    middle = (start + stop) // 2
    again = (start, middle) if node == 0 else (middle, stop)
    memory = {
        f"w|{N}|0|{start}:{stop}|{kind}": values(rank, n=stop - start),
        f"w|{N}|1|{again[0]}:{again[1]}|{kind}": values(9, rank, n=again[1] - again[0]),
    }
    return memory, {key: 1 / 2 if "|0|" in key else 1.0 for key in (k.replace(kind, "residual") for k in memory)}


def mean_of(memories, kind="residual", point=None):
    """The oracle: weighted sum over ranks and points in float64."""
    total = np.zeros(N)
    for memory, weights in memories:
        for key, value in memory.items():
            _, _, at, region, what = key.rsplit("|", 4)
            if what == kind and point in (None, at):
                start, stop = map(int, region.split(":"))
                total[start:stop] += weights[key.replace(kind, "residual")] * value.astype(np.float64)
    return total


def states_of(memories, nodes=TWO_BY_TWO, opts=None, step=5, counts=None):
    opts = opts or options()
    counts = {"w": 5} if counts is None else counts
    kept = [SyncState(StateStore(memory), weights, Counter(counts)) for memory, weights in memories]
    return loaded(on_ranks(nodes, lambda t: snapshots.snapshot(t, opts, step, kept[t.rank])))


def dealt(states, ranks):
    """Each of the new ranks brings its share of the states."""
    return [[states[old] for old in range(rank, len(states), ranks)] for rank in range(ranks)]


@pytest.fixture
def memories():
    return [memory_of(rank) for rank in range(4)]


# --- exactly --------------------------------------------------------------------------------------------------------


def test_the_same_session_goes_on_with_what_was_saved(memories):
    states = states_of(memories)
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank])))
    for result, (memory, weights) in zip(results, memories):
        assert (result.step, result.sync_state.counts, result.resharded) == (5, {"w": 5}, False)
        assert result.sync_state.weights == weights
        assert result.sync_state.store.keys() == memory.keys()
        assert all(np.array_equal(result.sync_state.store[key], memory[key]) for key in memory)


def test_what_is_loaded_is_a_copy(memories):
    states = states_of(memories)
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank])))
    key = next(iter(states[0]["arrays"]))
    results[0].sync_state.store[key][:] = 7
    assert not np.any(states[0]["arrays"][key] == 7)


def test_a_state_is_made_of_json_and_float32(memories):
    one = states_of(memories)[0]
    json.dumps({key: value for key, value in one.items() if key != "arrays"})
    assert {value.dtype for value in one["arrays"].values()} == {np.dtype("float32")}


# --- on other ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes", [FLAT_THREE, ((0,),), ((0,), (1,)), ((0, 1), (2,)), ((0, 1, 2, 3),), ((0, 1), (2, 3), (4, 5))], ids=str
)
def test_the_mean_residual_is_conserved_on_any_ranks(memories, nodes):
    ranks = sum(map(len, nodes))
    states = dealt(states_of(memories), ranks)
    results = loaded(on_ranks(nodes, lambda t: loading.load(t, options(), states[t.rank])))
    oracle = mean_of(memories).astype(np.float32)
    for result in results:
        assert result.resharded
        assert (result.step, result.sync_state.counts) == (5, {"w": 5})
        assert list(result.sync_state.store) == [f"w|{N}|whole|0:{N}|residual"]
        assert np.array_equal(result.sync_state.store[f"w|{N}|whole|0:{N}|residual"], oracle)


@pytest.mark.parametrize("given", [{"segment_bytes": 512}, {"min_bytes": 0}, {"route": "flat-allgather"}], ids=str)
def test_other_segments_or_routes_carry_over_as_well(memories, given):
    states = states_of(memories)
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(**given), states[t.rank])))
    oracle = mean_of(memories).astype(np.float32)
    assert all(np.array_equal(result.sync_state.store[f"w|{N}|whole|0:{N}|residual"], oracle) for result in results)


def test_rank_0_says_what_is_not_exact(memories, caplog):
    states = states_of(memories)
    loaded(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank])))
    assert caplog.text == ""
    loaded(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(segment_bytes=512), states[t.rank])))
    loaded(on_ranks(((0,),), lambda t: loading.load(t, options(), states)))
    segments, ranks = caplog.messages
    assert "from segment_bytes 1048576 to 512" in segments
    assert "from ranks [[0, 1], [2, 3]] by node to [[0]]" in ranks


def test_replicas_count_once():
    memory = {f"w|{N}|0|0:{N}|residual": values(3)}
    memories = [(memory, dict.fromkeys(memory, 1 / 4))] * 4  # four ranks that encode the same mean
    states = dealt(states_of(memories), 2)
    results = loaded(on_ranks(((0, 1),), lambda t: loading.load(t, options(), states[t.rank])))
    assert np.array_equal(results[1].sync_state.store[f"w|{N}|whole|0:{N}|residual"], values(3))


def test_what_was_carried_and_not_yet_used_is_carried_again(memories):
    states = states_of(memories)
    for nodes in (FLAT_THREE, ((0,),), TWO_BY_TWO, ((0, 1),)):
        ranks = sum(map(len, nodes))
        shares = dealt(states, ranks)
        results = loaded(on_ranks(nodes, lambda t, shares=shares: loading.load(t, options(), shares[t.rank])))
        states = states_of([(r.sync_state.store, r.sync_state.weights) for r in results], nodes)
    expected = mean_of(memories)
    got = results[0].sync_state.store[f"w|{N}|whole|0:{N}|residual"]
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_a_rank_may_bring_everything_and_others_nothing(memories):
    states = states_of(memories)
    shares = [[], states, []]
    results = loaded(on_ranks(FLAT_THREE, lambda t: loading.load(t, options(), shares[t.rank])))
    assert np.array_equal(
        results[0].sync_state.store[f"w|{N}|whole|0:{N}|residual"], mean_of(memories).astype(np.float32)
    )


def test_ef21_begins_again_with_what_all_have_said():
    memories = [memory_of(rank, "sent") for rank in range(4)]
    opts = options(feedback="ef21")
    states = dealt(states_of(memories, opts=opts), 3)
    results = loaded(on_ranks(FLAT_THREE, lambda t: loading.load(t, opts, states[t.rank])))
    first, second = (mean_of(memories, "sent", point).astype(np.float32) for point in "01")
    for result in results:
        memory = result.sync_state.store
        assert memory.begin("w", N, split=False) is None
        assert np.array_equal(memory[f"w|{N}|0|0:{N}|sent"], first)
        assert np.array_equal(memory[f"w|{N}|0-decoded|100:300|mean"], first[100:300])
        assert np.array_equal(memory[f"w|{N}|1|100:300|sent"], second[100:300])
        assert np.array_equal(memory[f"w|{N}|1-decoded|0:{N}|mean"], second)
        assert np.array_equal(memory[f"w|{N}|2|0:9|sent"], second[:9])
        memory.end("w", N)


def test_a_momentum_is_averaged_like_a_residual():
    opts = options(compressor="dgc:ratio=0.1")
    memories = []
    for rank in range(2):
        memory = {f"w|{N}|0|0:{N}|residual": values(rank)}
        for start in (0, N // 2):  # methods keep by part, residuals by region
            memory[f"w|{N}|0|{start}:{start + N // 2}|own.momentum"] = values(5, rank, start, n=N // 2)
        memories.append((memory, {f"w|{N}|0|0:{N}|residual": 1 / 2}))
    states = dealt(states_of(memories, ((0, 1),), opts), 3)
    results = loaded(on_ranks(FLAT_THREE, lambda t: loading.load(t, opts, states[t.rank])))
    memory = results[2].sync_state.store
    assert memory.begin("w", N, split=True) is None
    parts = [sum(values(5, rank, start, n=N // 2).astype(np.float64) for rank in range(2)) / 2 for start in (0, N // 2)]
    whole = np.concatenate(parts).astype(np.float32)
    assert np.array_equal(memory[f"w|{N}|0|0:333|own.momentum"], whole[:333])
    assert np.array_equal(memory.get(f"w|{N}|0|333:{N}|own.momentum"), whole[333:])
    assert np.array_equal(
        memory[f"w|{N}|0|0:333|residual"], ((values(0).astype(float) + values(1)) / 2)[:333].astype("f4")
    )


def test_warm_starts_begin_anew():
    opts = options(compressor="powersgd")
    memory = {f"w|{N}|0|0:{N}|residual": values(1), f"w|{N}|0|0:{N}|own.q": values(2, n=128)}
    states = states_of([(memory, {f"w|{N}|0|0:{N}|residual": 1.0})], ((0,),), opts)
    results = loaded(on_ranks(((0, 1),), lambda t: loading.load(t, opts, dealt(states, 2)[t.rank])))
    assert all(list(result.sync_state.store) == [f"w|{N}|whole|0:{N}|residual"] for result in results)


def test_what_a_method_does_not_name_is_refused(memories):
    memories[2][0][f"w|{N}|0|0:500|own.mystery"] = values(1, n=3)
    states = states_of(memories)
    refused(on_ranks(FLAT_THREE, lambda t: loading.load(t, options(), dealt(states, 3)[t.rank])), "'own.mystery'"[1:-1])
    results = on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank]))
    assert np.array_equal(loaded(results)[2].sync_state.store[f"w|{N}|0|0:500|own.mystery"], values(1, n=3))


def test_a_momentum_of_another_size_is_refused():
    opts = options(compressor="signum")
    memory = {f"w|{N}|0|0:{N}|own.momentum": values(1, n=N - 1)}
    states = states_of([(memory, {f"w|{N}|0|0:{N}|residual": 1.0})], ((0,),), opts)
    refused(on_ranks(((0, 1),), lambda t: loading.load(t, opts, dealt(states, 2)[t.rank])), "999 elements")


def test_a_residual_without_weight_is_refused(memories):
    memories[1][1].clear()
    states = states_of(memories)
    refused(on_ranks(FLAT_THREE, lambda t: loading.load(t, options(), dealt(states, 3)[t.rank])), "has no weight")


@pytest.mark.parametrize("name", compressors.names())
def test_methods_name_what_they_keep(name):
    method = compressors.get(name).at(0)
    for again in (method, method.second_pass()):
        context, x = Context(), values(4)
        payload = device.empty(again.nbytes(N) + 15, np.uint8, "cpu")
        offset = -payload.ctypes.data % 16
        payload = payload[offset : offset + again.nbytes(N)]
        for _ in range(2):
            again.encode(x, payload, np.zeros(N, np.float32), context)
            again.update_from_aggregate(payload, N, context)
        assert set(context.state) <= set(again.keeps)
        assert all(context.state[key].size == N for key, rule in again.keeps.items() if rule == "average")


# --- a store with resharded arrays ---------------------------------------------------------------------------------


def test_a_memory_is_cut_up_once():
    memory = StateStore({f"w|{N}|whole|0:{N}|residual": values(1)})
    with pytest.raises(KeyError):
        memory[f"w|{N}|0|0:10|residual"]
    assert memory.begin("w", N, split=True) is None
    assert np.array_equal(memory[f"w|{N}|0|0:10|residual"], values(1)[:10])
    memory[f"w|{N}|0|0:10|residual"][:] = 0
    assert not memory[f"w|{N}|0|0:10|residual"].any()
    for key in (f"v|{N}|0|0:10|residual", f"w|{N}|1|0:10|residual", f"w|{N - 1}|0|0:10|residual"):
        assert memory.get(key) is None
    memory.end("w", N)
    assert memory.get(f"w|{N}|0|10:20|residual") is None
    assert list(memory) == [f"w|{N}|0|0:10|residual"]


def test_without_feedback_the_residual_is_handed_out_once():
    memory = StateStore({f"a|b|{N}|whole|0:{N}|residual": values(1), f"c|{N}|whole|0:{N}|residual": values(2)})
    assert np.array_equal(memory.begin("a|b", N, split=False), values(1))
    assert memory.begin("a|b", N, split=False) is None
    assert memory.get(f"a|b|{N}|0|0:{N}|residual") is None
    assert np.array_equal(memory.begin("c", N, split=False), values(2))
    assert memory == {}


def test_weights_are_those_of_the_region_itself():
    weights = Weights({"w|90|0|0:90|residual": 0.25, "w|90|0|0:30|residual": 0.5, "w|90|1|0:30|residual": 1.0})
    assert weights.of(Key.parse("w|90|0|0:30|residual")) == 0.5
    assert weights.of(Key.parse("w|90|1|0:10|own.u")) == 1.0
    with pytest.raises(StateError, match="several weights"):
        weights.of(Key.parse("w|90|0|0:10|own.u"))


def test_of_a_tensor_in_ever_new_sizes_the_last_few_are_kept():
    sync_state = SyncState()
    dropped = []
    for n in [*range(1, 9), 1, 9, 10, 1]:
        dropped.append(sync_state.use("w", (("w", n),)))
        sync_state.store.setdefault(f"w|{n}|0|0:{n}|residual", np.ones(n, np.float32))
        sync_state.store.setdefault(
            f"w|{n}|7|0|0:7|residual", np.ones(7, np.float32)
        )  # another tensor: its name has a bar
        sync_state.weights[f"w|{n}|0|0:{n}|residual"] = 1.0
    assert dropped == [None] * 9 + [("w", 2), ("w", 3), None]
    sizes = {key.n for key in map(Key.parse, sync_state.store) if key.name == "w"}
    assert sizes == {1, 4, 5, 6, 7, 8, 9, 10}
    assert {Key.parse(text).n for text in sync_state.weights} == sizes
    assert sum(key.n == 7 and key.name != "w" for key in map(Key.parse, sync_state.store)) == 10


# --- what is refused, on all ranks alike ------------------------------------------------------------------------------


def changed(one, **changes):
    return snapshots.sealed({**one, **changes})


KEY = "w|9|0|0:9|residual"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 99}, "newer espresso_mpi"),
        ({"version": 3}, "older espresso_mpi"),
        ({"version": None}, "pass what state_dict() returned"),
        ({"rank": 77}, "rank is 77"),
        ({"rank": True}, "rank is True"),
        ({"nodes": [[0, 0]]}, "nodes"),
        ({"nodes": "x"}, "nodes is 'x'"),
        ({"options": None}, "options is None"),
        ({"step": "x"}, "step is 'x'"),
        ({"step": -1}, "step is -1"),
        ({"step": 2**63}, "step is"),
        ({"seed": True}, "seed is True"),
        ({"counts": {"w": -1}}, "counts is"),
        ({"weights": {KEY: 0.0}}, "weights is"),
        ({"weights": {KEY: float("nan")}}, "weights is"),
        ({"arrays": {KEY: np.zeros(9)}}, "float64"),
        ({"arrays": {KEY: np.zeros((3, 3), np.float32)}}, "(3, 3)"),
        ({"arrays": {KEY: np.zeros(8, np.float32)}}, "8 elements"),
        ({"arrays": {KEY: np.full(9, np.nan, np.float32)}}, "not finite"),
        ({"arrays": {"w": np.zeros(2, np.float32)}}, "the key 'w'"),
        ({"arrays": {"w|9|0|5:12|residual": np.zeros(7, np.float32)}}, "not within its 9"),
        ({"arrays": {"w|9|0|0:9|odd": np.zeros(9, np.float32)}}, "unknown kind"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(memories, change, words):
    states = states_of(memories)
    states[3] = changed(states[3], **change)
    results = on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank]))
    refused(results, words)
    refused(results, "rank 3 (host)")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda one: None, "NoneType"),
        (lambda one: {**one, "step": 6}, "checksum"),
        (lambda one: {**one, "arrays": {}}, "checksum"),
        (lambda one: {**one, "arrays": {KEY: "x"}}, "is str"),
        (lambda one: {**one, "arrays": {5: np.zeros(3, np.float32)}}, "the key 5"),
        (lambda one: {**one, "checksum": "x"}, "checksum is 'x'"),
    ],
)
def test_what_is_no_state_is_refused(memories, spoil, words):
    states = states_of(memories)
    states[0] = spoil(states[0])
    refused(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank])), words)


def test_missing_and_doubled_states_are_named(memories):
    states = states_of(memories)
    shares = [[states[0]], [states[1], states[3]], [states[3]]]
    results = on_ranks(FLAT_THREE, lambda t: loading.load(t, options(), shares[t.rank]))
    refused(results, "that of rank 2 is missing")
    refused(results, "that of rank 3 came from rank 1 (host) and rank 2 (host)")
    refused(on_ranks(FLAT_THREE, lambda t: loading.load(t, options(), [])), "no rank brought a state")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"step": 6}, "step is 5 in that of rank 0"),
        ({"seed": 9}, "seed is 0"),
        ({"generation": "00"}, "generation is ''"),
        ({"counts": {"w": 4}}, "counters is"),
        ({"nodes": [[0, 1, 2, 3]]}, "nodes is"),
    ],
    ids=str,
)
def test_states_of_different_checkpoints_are_refused(memories, change, words):
    states = states_of(memories)
    states[3] = changed(states[3], **change)
    refused(on_ranks(TWO_BY_TWO, lambda t: loading.load(t, options(), states[t.rank])), words)


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, FLAT_THREE], ids=str)
@pytest.mark.parametrize(
    "given, words",
    [
        ({"compressor": "topk"}, "compressor 'onebit', this session has 'topk'"),
        ({"feedback": "none"}, "feedback 'auto', this session has 'none'"),
        ({"compressor": "none", "plan": Plan(default=Strategy("onebit", "flat-allgather"))}, "compressor 'onebit'"),
    ],
    ids=str,
)
def test_another_compressor_or_feedback_is_refused(memories, nodes, given, words):
    shares = dealt(states_of(memories), sum(map(len, nodes)))
    refused(on_ranks(nodes, lambda t: loading.load(t, options(**given), shares[t.rank])), words)


def test_plans_may_differ_in_routes_but_not_in_compressors(memories):
    def plan(route, compressor="onebit"):
        return options(compressor="none", plan=Plan({"w": Strategy(compressor, route)}))

    shares = dealt(states_of(memories, opts=plan("flat-allgather")), 3)
    loaded(on_ranks(FLAT_THREE, lambda t: loading.load(t, plan("flat-alltoall"), shares[t.rank])))
    results = on_ranks(FLAT_THREE, lambda t: loading.load(t, plan("flat-alltoall", "topk"), shares[t.rank]))
    refused(results, "compressor of 'w' 'onebit', this session has 'topk'")


# --- files ------------------------------------------------------------------------------------------------------------


def saved(path, memories, nodes=TWO_BY_TWO, **given):
    states = states_of(memories, nodes, **given)
    loaded(on_ranks(nodes, lambda t: folder.save(t, states[t.rank], path)))
    return sorted(file.name for file in path.iterdir())


def test_files_are_read_back_by_the_same_ranks(tmp_path, memories):
    names = saved(tmp_path / "deep" / "down", memories)
    assert [name[:19] for name in names] == ["espresso-state.json", *(f"rank-{r:05}-of-00004" for r in range(4))]
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), tmp_path / "deep" / "down")))
    for result, (memory, weights) in zip(results, memories):
        assert not result.resharded
        assert result.sync_state.weights == weights
        assert all(np.array_equal(result.sync_state.store[key], memory[key]) for key in memory)


@pytest.mark.parametrize("nodes", [FLAT_THREE, ((0,),), ((0, 1), (2, 3), (4, 5))], ids=str)
def test_files_are_read_by_other_ranks(tmp_path, memories, nodes):
    saved(tmp_path, memories)
    results = loaded(on_ranks(nodes, lambda t: folder.load_files(t, options(), str(tmp_path))))
    oracle = mean_of(memories).astype(np.float32)
    assert all(np.array_equal(result.sync_state.store[f"w|{N}|whole|0:{N}|residual"], oracle) for result in results)


def test_names_of_tensors_may_be_anything(tmp_path):
    name = "layers/0|weight\n\N{SNOWMAN}:../x"
    memory = {f"{name}|{N}|0|0:{N}|residual": values(1)}
    saved(tmp_path, [(memory, dict.fromkeys(memory, 1.0))], ((0,),))
    results = loaded(on_ranks(((0,),), lambda t: folder.load_files(t, options(), tmp_path)))
    assert np.array_equal(results[0].sync_state.store[f"{name}|{N}|0|0:{N}|residual"], values(1))


def test_a_new_save_replaces_the_old_one_whatever_its_ranks(tmp_path, memories):
    before = saved(tmp_path, memories)
    (tmp_path / "notes.txt").write_text("mine")
    memory = {f"w|{N}|0|0:{N}|residual": values(1)}
    names = saved(tmp_path, [(memory, dict.fromkeys(memory, 1.0))], ((0,),), step=6)
    assert not set(before[1:]) & set(names)
    assert names[:2] == ["espresso-state.json", "notes.txt"]
    assert len(names) == 3
    results = loaded(on_ranks(((0,),), lambda t: folder.load_files(t, options(), tmp_path)))
    assert results[0].step == 6


def test_a_save_that_fails_leaves_the_one_before(tmp_path, memories):
    saved(tmp_path, memories)
    states = states_of(memories, step=6)
    states[2]["arrays"]["w|1|0|0:1|residual"] = object()  # as if its disk were full
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.save(t, states[t.rank], tmp_path)), "rank 2 (host)")
    assert not list(tmp_path.glob("*.tmp"))
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), tmp_path)))
    assert {result.step for result in results} == {5}


def test_ranks_that_save_at_different_steps_are_refused(tmp_path, memories):
    early, late = states_of(memories), states_of(memories, step=6)
    results = on_ranks(TWO_BY_TWO, lambda t: folder.save(t, late[t.rank] if t.rank == 1 else early[t.rank], tmp_path))
    refused(results, "step is 5 on rank 0 (host), 6 on rank 1 (host)")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, memories):
    (tmp_path / "file").write_text("")
    states = states_of(memories)
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.save(t, states[t.rank], tmp_path / "file")), "cannot be written")
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.save(t, states[t.rank], tmp_path if t.rank else None)), "TypeError")


def _truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _pickle(file):
    np.savez(file, header=np.array([{"a": 1}], dtype=object))


def _array(file):
    with open(file, "wb") as out:
        np.save(out, np.zeros(3))


def _without_header(file):
    np.savez(file, other=np.zeros(3))


def _no_mapping(file):
    np.savez(file, header=np.frombuffer(b"[1, 2]", np.uint8))


@pytest.mark.parametrize("spoil", [_truncate, _flip, _pickle, _array, _without_header, _no_mapping])
@pytest.mark.parametrize("nodes", [TWO_BY_TWO, FLAT_THREE], ids=str)
def test_a_damaged_file_is_refused(tmp_path, memories, spoil, nodes):
    names = saved(tmp_path, memories)
    spoil(tmp_path / names[2])
    results = on_ranks(nodes, lambda t: folder.load_files(t, options(), tmp_path))
    refused(results, "damaged, or not written by Session.save")
    refused(results, names[2])


def test_missing_files_are_refused(tmp_path, memories):
    refused(on_ranks(FLAT_THREE, lambda t: folder.load_files(t, options(), tmp_path)), "espresso-state.json: not found")
    names = saved(tmp_path, memories)
    (tmp_path / names[4]).unlink()
    refused(on_ranks(FLAT_THREE, lambda t: folder.load_files(t, options(), tmp_path)), f"{names[4]}: not found")


def test_a_renamed_file_is_refused(tmp_path, memories):
    names = saved(tmp_path, memories)
    shutil.copy(tmp_path / names[1], tmp_path / names[2])
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), tmp_path)), "was it renamed?")


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "expected JSON"),
        ("[]", "got list"),
        ('{"version": 5}', "newer"),
        ('{"version": 4}', "missing or damaged"),
        ('{"version": 4, "ranks": 4, "generation": "../../etc/passwd"}', "missing or damaged"),
        ('{"version": 4, "ranks": -4, "generation": "0123456789abcdef"}', "missing or damaged"),
        ('{"version": 4, "ranks": true, "generation": "0123456789abcdef"}', "missing or damaged"),
        ('{"version": 4, "ranks": 4, "ranks": 4, "generation": "0123456789abcdef"}', "ranks: the key stands twice"),
        pytest.param('{"version": 4, "ranks": 1' + 400 * "0" + "}", "a whole number of 64 bits", id="large"),
        pytest.param(60_000 * "[", "nest more than 64 deep", id="deep"),
        pytest.param(70_000 * " ", "expected at most 65536", id="long"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, memories, content, words):
    saved(tmp_path, memories)
    (tmp_path / "espresso-state.json").write_text(content)
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), tmp_path)), words)


KILLED = """
import os, sys
from pathlib import Path
from espresso_mpi.files.atomic import replacing
with replacing(Path(sys.argv[1])) as out:
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_save_left_is_cleared_away_by_the_next(tmp_path, memories):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "espresso-state.json")])
    assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    assert len(saved(tmp_path, memories)) == 5


def test_ranks_of_one_node_save_into_one_folder(tmp_path, memories):
    states, paths = states_of(memories), [tmp_path / str(rank) for rank in range(4)]
    results = on_ranks(TWO_BY_TWO, lambda t: folder.save(t, states[t.rank], paths[t.rank]))
    refused(results, f"the path is {paths[0]} on rank 0 (host), {paths[1]} on rank 1 (host)")
    assert not list(tmp_path.iterdir())


def test_folders_of_different_saves_are_refused(tmp_path, memories):
    saved(tmp_path / "a", memories)
    saved(tmp_path / "b", memories)
    paths = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    refused(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), paths[t.rank])), "generation is")


def test_folders_that_nodes_do_not_share_do_for_the_same_ranks(tmp_path, memories):
    states, paths = states_of(memories), [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    loaded(on_ranks(TWO_BY_TWO, lambda t: folder.save(t, states[t.rank], paths[t.rank])))
    results = loaded(on_ranks(TWO_BY_TWO, lambda t: folder.load_files(t, options(), paths[t.rank])))
    assert not any(result.resharded for result in results)
    assert (tmp_path / "b" / "espresso-state.json").exists()
