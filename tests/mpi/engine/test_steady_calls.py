"""Calls that are made again run by what was prepared for them: with the bits, state and statistics of the Python
executor, which prepares nothing, whatever comes in between."""

import itertools
import time
import weakref

import numpy as np
import pytest
from patience import patient_barrier
from session_cases import node_layouts, values

from espresso_mpi import Plan, Session, Strategy
from espresso_mpi.collectives.bucket_program import BucketProgram
from espresso_mpi.collectives.executor import Program
from espresso_mpi.collectives.messages.switches import EXECUTOR
from espresso_mpi.collectives.progress import RoundRobinRunner
from espresso_mpi.collectives.tables.expected_call import ExpectedCall
from espresso_mpi.collectives.tables.node_call import NodeCall
from espresso_mpi.collectives.tables.one_call import OneCall, RepeatedTable
from espresso_mpi.engine import negotiation
from espresso_mpi.engine.dispatcher import Dispatcher
from espresso_mpi.errors import EspressoError, MismatchError, NonFiniteError, RankTimeoutError, RemoteError

pytestmark = pytest.mark.mpi(min_size=2)

small = []
"""What has run small calls again, in order."""

SIZES = {"a": 5003, "tiny": 7, "b": 900, "small": 60, "c": 2111}


@pytest.fixture
def again(monkeypatch):
    """The runs of what was prepared, in order: the elements of a call's tensors, or of the one of a small call."""
    found = []
    run = RepeatedTable.run

    def of_small(self, arrays, *rest):
        found.append(tuple(x.size for x in arrays))
        small.append(type(self))
        return run(self, arrays, *rest)

    def counted(repeat):
        def of_some(self, arrays, jobs, steps, *rest):
            if steps:  # else only where their residuals are was known
                found.append(tuple(x.size for x in arrays))
            return repeat(self, arrays, jobs, steps, *rest)

        return of_some

    small.clear()
    monkeypatch.setattr(RepeatedTable, "run", of_small)
    for program in (BucketProgram, Program):
        monkeypatch.setattr(program, "repeat", counted(program.repeat))
    return found


def left_by(world, monkeypatch, again, way, calls, **options):
    """What calls leave on this rank, and which of them ran again by what was prepared.

    Args:
        calls: functions (session, step) that return arrays, bytes or None.
    """
    monkeypatch.setenv(EXECUTOR, way)
    again.clear()
    with Session(world, **{"seed": 3, "timeout": 120, "min_bytes": 400, **options}) as session:
        results, ran, began = [], [], time.perf_counter()
        for step, call in enumerate(calls):
            before = len(again)
            found = call(session, step)
            ran.append(again[before:])
            results += [array.tobytes() for array in (found or {}).values()]
        arrays = sorted((key, value.tobytes()) for key, value in session.state_dict()["arrays"].items())
        stats = session.stats()
        most = len(SIZES) * (time.perf_counter() - began)  # several tensors travel at once
        assert all(0 <= seconds <= most for seconds in stats.seconds_by.values()), stats.seconds_by
        counts = {
            name: (one.steps, one.bytes_by_level, one.last.step, one.last.bytes_by_level)
            for name, one in stats.tensors.items()
            if name != "allreduce"  # short dense sums are counted with their headers
        }
        timed = {
            name: {kind for kind, s in one.last.seconds_by.items() if s > 0} for name, one in stats.tensors.items()
        }
        return (results, arrays, counts, stats.bytes_by_level, stats.saturated), ran, timed


def same_as_python(world, monkeypatch, again, calls, headers=True, **options):
    """Which calls ran again by what was prepared; nothing else may differ from the Python executor.

    Args:
        headers: whether as many bytes of headers are sent.
    """
    expected, none, _ = left_by(world, monkeypatch, again, "python", calls, **options)
    found, ran, timed = left_by(world, monkeypatch, again, "compiled", calls, **options)
    assert not any(none)
    for what, a, b in zip(("results", "state", "by tensor", "bytes", "values that were cut"), expected, found):
        assert a == b or (what == "bytes" and not headers), what
    compressed = set(SIZES) - {"tiny", "small"}
    assert all({"encode", "decode", "wire"} <= kinds for name, kinds in timed.items() if name in compressed), timed
    return ran


def several(session, step, **changed):
    """One call with several tensors, of which some are dense."""
    rank = session._transport.rank
    grads = {name: values(rank, step, n) for name, n in SIZES.items()} | changed
    session.sync(grads)
    return {name: array for name, array in grads.items() if array is not None}


def one(session, step, n=3000):
    array = values(session._transport.rank, step, n)
    session.sync({"w": array})
    return {"w": array}


def few(session, step, **changed):
    """One call with some small tensors that are all compressed."""
    grads = {name: values(session.rank, step, n) for name, n in (("b", 900), ("c", 2111))} | changed
    session.sync(grads)
    return grads


def strided_on_rank_0(session, step):
    """The array of one rank is strided, so that it alone takes the ordinary path."""
    rank = session._transport.rank
    array = values(rank, step, SIZES["b"])
    if rank == 0:
        array = np.repeat(array, 2)[::2]
    return several(session, step, b=array)


def odd_on_the_last_rank(call):
    def run(session, step):
        transport = session._transport
        real = values(transport.rank, step, SIZES["b"])
        if transport.rank == transport.topology.size - 1:
            real[5] = np.nan
        return call(session, real)

    return run


def reloaded(session, step):
    session.load_state_dict(session.state_dict())


BUCKET = (5003, 900, 2111)


@pytest.mark.parametrize(
    ("compressor", "layout"),
    [
        ("onebit", 1), ("int8:rounding=stochastic", 0), pytest.param("topk:ratio=0.1", 0, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_calls_of_several_tensors(world, monkeypatch, again, compressor, layout):
    calls = [
        *[several] * 3, strided_on_rank_0, several,
        lambda session, step: several(session, step, b=None), several,
        lambda session, step: several(session, step, b=values(session._transport.rank, step, 901)), several, several,
        odd_on_the_last_rank(lambda session, real: several(session, 10, b=real)), several,
        reloaded, several, several,
    ]  # fmt: skip
    options = {"compressor": compressor, "nodes": node_layouts(world.size)[layout], "nonfinite": "skip"}
    ran = same_as_python(world, monkeypatch, again, calls, **options)
    usual = [step for step, found in enumerate(ran) if found == [BUCKET]]
    assert usual == [1, 2, *([3] if world.rank else []), 4, 6, 8, 9, 11, 13, 14]


def test_a_call_is_not_remembered_as_it_runs_beside_others(world, monkeypatch, again):
    """Its first bucket is small only where it runs alone, and ranks may differ in whether they make it as before."""
    others, begin, busy = [False], Dispatcher.begin, RoundRobinRunner.busy.fget

    def begin_beside_others(self, started):
        with monkeypatch.context() as patch:
            patch.setattr(RoundRobinRunner, "busy", property(lambda runner: others[0] or busy(runner)))
            begin(self, started)

    def beside(session, step):
        others[0] = True
        found = several(session, step)
        others[0] = False
        return found

    monkeypatch.setattr(Dispatcher, "begin", begin_beside_others)
    calls = [*[beside] * 2, several, strided_on_rank_0, several, beside, strided_on_rank_0, several]
    ran = same_as_python(world, monkeypatch, again, calls, compressor="onebit", fuse_bytes=1200, timeout=20)
    steps = [step for step, found in enumerate(ran) if (900, 2111) in found]
    assert steps == ([3, 4, 6, 7] if world.rank else [4, 7])


def test_tensors_of_torch_run_again_like_arrays(world, monkeypatch, again):
    """Also those that lie in other memory each time."""
    torch = pytest.importorskip("torch")

    def of_torch(session, step):
        arrays = {name: values(session._transport.rank, step, n) for name, n in SIZES.items()}
        grads = {name: torch.from_numpy(array.copy()).clone() for name, array in arrays.items()}
        kept.append(grads)
        session.sync(grads)
        return {name: tensor.numpy() for name, tensor in grads.items()}

    for single in (False, True):
        kept = []
        calls = [of_torch if step % 2 else several for step in range(6)] if not single else [one, *[of_one(torch)] * 4]
        ran = same_as_python(world, monkeypatch, again, calls, compressor="onebit")
        assert [step for step, found in enumerate(ran) if found] == list(range(1, len(calls)))


def of_one(torch):
    def call(session, step):
        tensor = torch.from_numpy(values(session._transport.rank, step, 3000))
        session.sync({"w": tensor})
        return {"w": tensor.numpy()}

    return call


def layout(world, nodes):
    """Options of one node, of pairs, of a node for each rank by two routes, of a large node and a small one, and of a
    route that decodes before its first message."""
    if nodes < 2:
        return {"nodes": node_layouts(world.size)[nodes]}
    if nodes == 5:
        twice = "encode@cpu/allgather@intra/decode@cpu/encode@cpu/allgather@inter/decode@cpu"
        return {"nodes": [[rank] for rank in range(world.size)], "route": twice}
    if nodes == 4:
        return {"nodes": node_layouts(world.size)[-1]}
    return {"nodes": [[rank] for rank in range(world.size)], "route": ["flat-allgather", "flat-alltoall"][nodes - 2]}


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4])
def test_small_calls_and_what_comes_between(world, monkeypatch, again, nodes):
    """Payloads are piggybacked where all ranks are on one node, and where each one is alone on its node.

    Elsewhere headers travel beside the first messages of calls that all ranks expect.
    """

    def odd(session, real):
        with pytest.raises(NonFiniteError, match=f"rank {world.size - 1}"):
            session.sync({"w": real})

    calls = [
        *[one] * 4,
        lambda session, step: one(session, step, 2999), one, one,
        odd_on_the_last_rank(odd), one, reloaded, one, one, several, one,
    ]  # fmt: skip
    options = {"compressor": "int8:rounding=stochastic", **layout(world, nodes)}
    ran = same_as_python(world, monkeypatch, again, calls, headers=nodes in (0, 2), **options)
    assert [step for step, found in enumerate(ran) if found == [(3000,)]] == [1, 2, 3, 5, 6, 8, 10, 11, 13]
    on_nodes = NodeCall if world.size == 2 else ExpectedCall
    kinds = [OneCall, on_nodes, NodeCall, ExpectedCall, on_nodes]
    even = len({len(ranks) for ranks in options["nodes"]}) == 1  # otherwise some ranks have no peer on other nodes
    assert set(small) == ({kinds[nodes]} if even else set())


@pytest.mark.parametrize(
    ("nodes", "compressor"), [(0, "dgc:ratio=0.1"), (0, "acpsgd"), (1, "thc"), (3, "dgc:ratio=0.1")]
)
def test_small_calls_of_several_tensors(world, monkeypatch, again, nodes, compressor):
    """Of which one is skipped in the first step: what travels then is not the whole call."""

    def odd(session, real):
        return few(session, 0, b=real)

    calls = [
        odd_on_the_last_rank(odd), *[few] * 4, one, few, few,
        odd_on_the_last_rank(odd), few, few, few, reloaded, few, few,
    ]  # fmt: skip
    options = {"compressor": compressor, "nonfinite": "skip", **layout(world, nodes)}
    ran = same_as_python(world, monkeypatch, again, calls, headers=nodes == 0, **options)
    usual = [step for step, found in enumerate(ran) if found == [(900, 2111)]]
    usual = [step for step in usual if step != 8]  # that one is tried, and given up
    assert usual == [2, 3, 4, 6, 7, 9, 10, 11, 13, 14]
    if nodes in (0, 3):
        assert set(small) == {OneCall if nodes == 0 else ExpectedCall}


@pytest.mark.parametrize(("compressor", "nodes"), [("onebit", 0), ("int8:rounding=stochastic", 1)])
def test_pushed_tensors_know_where_their_residuals_are(world, monkeypatch, compressor, nodes):
    """Whichever of them share messages: which do differs from step to step, and so do the arrays that come again."""
    known = []
    repeat = {program: program.repeat for program in (BucketProgram, Program)}

    def counted(self, arrays, jobs, steps, recorder, prepared):
        known.append((prepared, tuple(job.name for job in jobs)))
        return repeat[type(self)](self, arrays, jobs, steps, recorder, prepared)

    def pushes(session, step):
        """The same on all ranks: some are waited for before the others are pushed; one has another size at times."""
        order = np.random.default_rng(step).permutation(list(SIZES))
        grads = {str(name): values(session.rank, step, SIZES[name] + (step % 7 == 5)) for name in order}
        for number, (name, grad) in enumerate(grads.items()):
            handle = session.push(name, grad)
            if number == step % len(grads):
                handle.wait()
        session.wait_all()
        return grads

    def lasting(session, step):
        """Only what is left of gradients by compression changes; the state is the same object."""
        session.sync({"other": values(session.rank, step, 700)})

    def dropped(session, step):
        """So many sizes of a tensor that the state of its usual one is dropped."""
        for more in range(1, 10):
            session.push("c", values(session.rank, step, SIZES["c"] + more)).wait()

    def with_and_without_feedback(session, step):
        """The same tensor by the same program: only one of the calls has a residual."""
        arrays = {str(n): values(session.rank, step + n, SIZES["a"]) for n in range(4)}
        for n, x in arrays.items():
            session.allreduce(x, name="mean", compressor=compressor, feedback=int(n) % 2 == 1)
        return arrays

    calls = [
        *[pushes] * 9, reloaded, *[pushes] * 4, lasting, *[pushes] * 2, dropped, *[pushes] * 2,
        *[with_and_without_feedback] * 3,
    ]  # fmt: skip
    options = {"compressor": compressor, **layout(world, nodes)}
    expected, _, _ = left_by(world, monkeypatch, [], "python", calls, **options)
    for program in repeat:
        monkeypatch.setattr(program, "repeat", counted)
    found, _, _ = left_by(world, monkeypatch, [], "compiled", calls, **options)
    assert known and len({id(prepared) for prepared, _ in known}) < len(known), "nothing was used again"
    for what, a, b in zip(("results", "state"), expected, found):
        assert a == b, what


@pytest.mark.parametrize("how", ["load", "follow"])
def test_nothing_keeps_the_residuals_of_another_state(world, open_session, how):
    """They are as large as the gradients."""
    session = open_session(compressor="onebit")
    for step in range(3):
        for name, n in SIZES.items():
            session.push(name, values(session.rank, step, 10 * n))
        session.wait_all()
    kept = [weakref.ref(array) for array in session._engine.sync_state.store.values()]
    assert kept
    if how == "load":
        session.load_state_dict(session.state_dict())
    else:
        session.follow(Plan(default=Strategy("none", "flat")))
    assert all(ref() is None for ref in kept)


def other_calls(size):
    """Calls that may come where another one is expected; some ranks make them differently, or in another order."""

    def short(session, step, n=10):
        return {"sum": session.allreduce(values(session.rank, step, n), op="sum")}

    def copied(session, step):
        return {"copy": session.broadcast(values(session.rank, step, 300), root=step % size)}

    def swapped(session, step):
        rank, rows = session.rank, [[(a + b + step) % 3 for b in range(size)] for a in range(size)]
        received = [row[rank] for row in rows]
        x = values(rank, step, sum(rows[rank]))
        return {"swap": session.alltoall(x, splits=rows[rank], received=received, compressor="int8")}

    def pushed(session, step):
        given = {name: values(session.rank, step + k, 500 + k) for k, name in enumerate(["p", "q"])}
        order = sorted(given, reverse=session.rank % 2 == 1)
        handles = [session.push(name, given[name]) for name in order]
        found = one(session, step) if step % 2 else {}
        for handle in handles:
            handle.wait()
        return {**given, **found}

    def refused(session, step):
        x = values(session.rank, step, 3000 + (session.rank == step % size))
        with pytest.raises(MismatchError, match="3001"):
            session.sync({"w": x})

    def strided(session, step):
        x = values(session.rank, step, 3000)
        given = np.repeat(x, 2)[::2] if session.rank == step % size else x
        session.sync({"w": given})
        return {"w": np.ascontiguousarray(given)}

    def another(session, step):
        x = values(session.rank, step, 2000)
        session.sync({"other": x})
        return {"other": x}

    def long(session, step):
        return short(session, step, 100_000)

    def met(session, step):
        session.barrier()

    def early(session, step):
        """One rank has another call under way when it makes the one that is expected."""
        x, first = values(session.rank, step, 700), session.rank == step % size
        handle = session.push("p", x) if first else None
        found = one(session, step)
        handle = handle or session.push("p", x)
        handle.wait()
        return {**found, "early": x}

    return [short, copied, swapped, pushed, refused, another, early, long, met, several, few, strided]


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_any_call_may_come_where_another_is_expected(world, monkeypatch, again, nodes, seed):
    rng, others = np.random.default_rng(seed), other_calls(world.size)
    calls = [one] * 4
    for _ in range(25):
        calls += [others[rng.integers(len(others) - (len(calls) < 60))]] * rng.integers(1, 3) + [one] * rng.integers(4)
    options = {"compressor": "onebit", **layout(world, nodes)}
    ran = same_as_python(world, monkeypatch, again, calls, headers=False, **options)
    even = len({len(ranks) for ranks in options["nodes"]}) == 1
    assert any(ran) and (ExpectedCall in small) == (even and (world.size > 2 or nodes != 1))


@pytest.mark.parametrize("nodes", [0, 1])
def test_tensors_that_are_dense_at_first(world, monkeypatch, again, nodes):
    """What runs again is prepared only once the tensor is compressed."""
    for call, what in ((one, (3000,)), (several, BUCKET)):
        options = {"compressor": "onebit", "dense_steps": 3, "nodes": node_layouts(world.size)[nodes]}
        ran = same_as_python(world, monkeypatch, again, [call] * 7, headers=nodes == 0, **options)
        assert [step for step, found in enumerate(ran) if found == [what]] == [4, 5, 6]


@pytest.mark.parametrize("nodes", [0, 2])
def test_parameters_with_a_schedule_change(world, monkeypatch, again, nodes):
    options = {"compressor": "onebit:block=64~128@3/1", **layout(world, nodes)}
    ran = same_as_python(world, monkeypatch, again, [one] * 7, **options)
    assert [step for step, found in enumerate(ran) if found] == [1, 2, 3, 4, 5, 6]  # each by the program of its step
    ran = same_as_python(world, monkeypatch, again, [several] * 6, **options)
    assert not any(ran)


def summed(session, step):
    session.allreduce(values(session.rank, step, 10), op="sum")


@pytest.mark.parametrize(("nodes", "call"), [(0, one), (1, one), (1, summed), (2, one), (3, one)])
def test_a_rank_that_does_not_make_the_call_is_named(world, nodes, call):
    """The others wait inside the compiled call, or of another call where one is expected."""
    last, session = world.size - 1, Session(world, compressor="onebit", min_bytes=0, timeout=3, **layout(world, nodes))
    for prepare in (summed, summed, one, one, one):
        prepare(session, 0)
    world.Barrier()
    if world.rank == last:
        patient_barrier(world)  # the others have given up

    def twice():
        call(session, 3)
        call(session, 4)  # of two ranks, the late one has all that it needs of the other, and hears of it here

    with pytest.raises(EspressoError) as caught:
        twice()
    if world.rank != last:
        patient_barrier(world)
    texts = world.allgather(f"{type(caught.value).__name__}: {caught.value}")
    assert any(text.startswith(RankTimeoutError.__name__) and f"rank {last}" in text for text in texts[:last]), texts
    assert all("RankTimeoutError" in text for text in texts), texts
    assert not session.usable


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_rank_that_fails_is_heard_where_another_call_was_expected(world, nodes):
    """At once, not after the timeout."""
    last, session = world.size - 1, Session(world, compressor="onebit", min_bytes=0, timeout=60, **layout(world, nodes))
    for prepare in (summed, summed, one, one, one):
        prepare(session, 0)
    if world.rank == last:
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError("of mine")
    else:
        with pytest.raises(RemoteError, match="ZeroDivisionError: of mine"):
            summed(session, 1)
    world.Barrier()


def test_a_push_of_the_same_memory_meanwhile(world, open_session):
    """Pushes that are not waited for: their memory is claimed, and the next call does not run by itself."""
    session, twin = (open_session(compressor="onebit", seed=1) for _ in range(2))
    for step in range(5):
        arrays = [values(world.rank, step, 800), values(world.rank, step + 20, 801)]
        expected = [twin.sync({"w": arrays[0].copy()})["w"], twin.push("v", arrays[1].copy()).wait()]
        handle = session.push("v", arrays[1])
        with pytest.raises(EspressoError, match="in flight"):
            session.sync({"w": arrays[1]})
        session.sync({"w": arrays[0]})
        assert (arrays[0] == expected[0]).all()
        assert (handle.wait() == expected[1]).all()


@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_numbers_of_calls_are_forgotten_by_all_at_once(world, monkeypatch, nodes):
    """While one rank makes a call that would be piggybacked on its header, and the others make more than that one."""
    monkeypatch.setattr(negotiation, "_KNOWN", 6)
    rank = world.rank
    session = Session(world, compressor="onebit", min_bytes=0, timeout=10, **layout(world, nodes))
    mean = (world.size - 1) / 2

    def pushed(period):
        return session.push(f"new {period}", np.full(300, rank, np.float32))

    def synchronised():
        x = np.full(500, rank, np.float32)
        session.sync({"w": x})
        return x

    for period in range(2):
        for _ in range(3):
            synchronised()
        for more in itertools.count():
            if len(session._engine._negotiation.contents) >= 6:
                break
            session.allgather(np.ones(2), name=f"{period} {more}")
        world.Barrier()
        first = None if rank == 0 else pushed(period)
        x = synchronised()
        y = (first or pushed(period)).wait()
        assert np.allclose(x, mean) and np.allclose(y, mean)
        assert np.allclose(synchronised(), mean) and np.allclose(session.push("more", np.ones(3)).wait(), 1)
        assert len(session._engine._negotiation.contents) < 6, "they were not forgotten"
    session.close()
