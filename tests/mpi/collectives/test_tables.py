"""The compiled executor against the Python executor: the same bits, the same state, the same bytes, on every route."""

import itertools
import time

import pytest
from session_cases import COMPRESSED, DENSE, node_layouts, values

from espresso_mpi import Session
from espresso_mpi.collectives import bucket_program, executor
from espresso_mpi.collectives.messages import transport as transport_module
from espresso_mpi.collectives.messages.single_copy import SingleCopy, probe
from espresso_mpi.collectives.messages.switches import EXECUTOR
from espresso_mpi.collectives.messages.window_kernels import WindowKernels
from espresso_mpi.collectives.tables import passes
from espresso_mpi.compressors import register, unregister
from espresso_mpi.compressors.drive import Drive
from espresso_mpi.compressors.powersgd import PowerSGD
from espresso_mpi.engine import piggyback_limit
from espresso_mpi.errors import ConfigError, EspressoError, RemoteError, TransportError
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.timeout(300)]

SIZES = {"one": 1, "odd": 5003, "alone": 3001}


def run_of(world, monkeypatch, way, **options):
    """Everything that three steps leave on this rank, two tensors that share messages and one that does not."""
    monkeypatch.setenv(EXECUTOR, way)
    shared = {"fuse_bytes": 100_000}  # a measured limit differs from session to session
    with Session(world, min_bytes=0, seed=3, timeout=120, **shared, **options) as session:
        found = []
        for step in range(3):
            grads = {name: values(world.rank, step, n) for name, n in SIZES.items()}
            alone = {"alone": grads.pop("alone")}
            session.sync(grads)
            session.sync(alone)
            found += [array.tobytes() for array in (*grads.values(), *alone.values())]
        state, stats = session.state_dict(), session.stats()
        arrays = sorted((key, value.tobytes()) for key, value in state["arrays"].items())
        sent = {name: (one.bytes_by_level, one.steps) for name, one in stats.tensors.items()}
        timed = {name: {kind for kind, s in one.seconds_by.items() if s > 0} for name, one in stats.tensors.items()}
        return [found, arrays, sent, stats.saturated], timed, session.executors


def differences(world, monkeypatch, nodes, **options):
    """What differs between the two executors, in words, and what ran the tensors."""
    expected, _, by_python = run_of(world, monkeypatch, "python", nodes=nodes, **options)
    found, timed, executors = run_of(world, monkeypatch, "compiled", nodes=nodes, **options)
    parts = ("results", "state", "bytes by tensor", "values that were cut")
    faults = [f"{what} on {nodes}" for what, a, b in zip(parts, expected, found) if a != b]
    faults += [f"{how} on {nodes}" for how in by_python.values() if how != f"Python: {EXECUTOR}=python"]
    faults += [f"{kinds} on {nodes}" for kinds in timed.values() if not {"encode", "decode", "wire"} <= kinds]
    every = [f"rank {rank}: {fault}" for rank, of in enumerate(world.allgather(faults)) for fault in of]
    return every, executors  # all ranks fail together, or go on to the next nodes


@pytest.mark.parametrize("route", COMPRESSED)
def test_a_table_leaves_what_the_python_executor_leaves(world, monkeypatch, route):
    one, pairs, alone, *lopsided = node_layouts(world.size)
    by_nodes = "intra" in str(Route.parse(route))
    for nodes in [pairs, *lopsided] if by_nodes else [one, alone]:  # by the window, and by messages
        faults, executors = differences(world, monkeypatch, nodes, compressor="onebit", route=route)
        assert not faults
        assert all(how.startswith("table of") for how in executors.values()) or "broadcast" in str(Route.parse(route))


@pytest.mark.parametrize("route", DENSE)
@pytest.mark.parametrize("fused", [0, 1 << 20], ids=["apart", "fused"])
def test_dense_tensors_between_nodes(world, monkeypatch, route, fused):
    """Short ones in one exchange, others in two, in several messages and segments."""
    options = {"segment_bytes": 8192, "message_bytes": 1024, "fuse_bytes": fused}
    # measured, it would differ from session to session, and the bytes with it
    monkeypatch.setattr(piggyback_limit, "_measured", lambda transport, ways: piggyback_limit.SURE // world.size)
    for nodes in node_layouts(world.size)[1:]:
        runs = []
        for way in ("python", "compiled"):
            monkeypatch.setenv(EXECUTOR, way)
            with Session(world, nodes=nodes, timeout=60, route=route, **options) as session:
                grads = {name: values(world.rank, 0, n) for name, n in SIZES.items()}
                for _ in range(2):
                    session.sync(grads)
                sent = {name: one.bytes_by_level for name, one in session.stats().tensors.items()}
                runs.append(([array.tobytes() for array in grads.values()], sent))
                hows = set(session.executors.values())
        fine = runs[0] == runs[1] and {how[:8] for how in hows} == {"table of"}
        assert world.allgather(fine) == [True] * world.size, (nodes, hows)


METHODS = (
    "int8:rounding=stochastic", "int4", "fp8_e4m3", "fp16", "bf16:rounding=stochastic", "topk:ratio=0.1", "qsgd",
    "dgc:ratio=0.1,values=int4", "signum", "eden:bits=3", "dct_topk:values=int8", "bound:rel=0.01",
)  # fmt: skip


class WithoutKernels(Drive):
    """A method of somebody's own."""

    name = "test-foreign"

    def _encode_cpu(self, *given):
        super()._encode_cpu(*given)

    def _decode_cpu(self, *given):
        super()._decode_cpu(*given)


class AgreedWithoutKernels(PowerSGD):
    """One whose payloads are summed."""

    name = "test-agreed"

    def _summarise_cpu(self, *given):
        super()._summarise_cpu(*given)

    def update_from_aggregate(self, *given):
        super().update_from_aggregate(*given)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(WithoutKernels)
    yield
    unregister(WithoutKernels.name)


@pytest.mark.parametrize("method", [*METHODS, WithoutKernels.name])
def test_every_kernel_by_address(world, monkeypatch, method):
    for nodes in node_layouts(world.size)[:2]:
        faults, executors = differences(world, monkeypatch, nodes, compressor=method)
        assert not faults
        assert all(how.startswith("table of") for how in executors.values()), executors
        for how in executors.values():
            python = how.partition("; Python does ")[2].split(", ")
            expected = {"encode", "decode"} if method == WithoutKernels.name else set()
            assert {part.partition(" ")[0] for part in python if part} == expected, how


SUMMED = (
    "powersgd:rank=2", "acpsgd", "randomk:ratio=0.1", "thc:levels=100", "thc:element=int16,levels=20000",
    "topk_chunked:ratio=0.2,values=float16", "count_sketch",
)  # fmt: skip


@pytest.mark.parametrize("method", SUMMED)
def test_payloads_that_are_summed(world, monkeypatch, method):
    """Through the slots of a window, and by messages; sums of small integers and of halves, and maxima."""
    one, pairs, alone, *lopsided = node_layouts(world.size)
    for route, layouts in (("flat-linear", [one, alone]), ("hierarchical-linear", [pairs, *lopsided])):
        for nodes in layouts:
            faults, executors = differences(world, monkeypatch, nodes, compressor=method, route=route)
            assert not faults
            python = {part for how in executors.values() for part in how.partition("Python does ")[2].split(", ")}
            alone = {"", "reduce_scatter@intra", "allgather@intra"}  # on the node of one rank
            assert python <= alone, executors


def test_sums_that_python_makes(world, monkeypatch):
    """Those that are too long for a slot, or that a method without kernels agrees on, and those of other routes."""
    register(AgreedWithoutKernels)
    one, pairs, *_ = node_layouts(world.size)
    by_root = "encode@cpu/reduce@intra/allreduce@inter/broadcast@intra/decode@cpu"
    cases = [("powersgd:rank=70", "flat-linear", one), ("thc", by_root, pairs), ("test-agreed", "flat-linear", one)]
    try:
        for method, route, nodes in cases:
            faults, executors = differences(world, monkeypatch, nodes, compressor=method, route=route)
            assert not faults
            assert any("Python" in how and how.startswith("table") for how in executors.values()), executors
    finally:
        unregister(AgreedWithoutKernels.name)


def test_payloads_that_pass_the_window_in_chunks_and_take_several_messages(world, monkeypatch):
    options = {"compressor": "fp16", "window_bytes": 2048, "message_bytes": 1024}
    for nodes in node_layouts(world.size)[::2]:
        assert not differences(world, monkeypatch, nodes, **options)[0]


GATHERS = ("onebit:block=192", "int8:block=100", "signsgd")
PASSES = [
    *((method, route, {}) for method in GATHERS for route in ("hierarchical-allgather", "hierarchical-alltoall")),
    *((method, "hierarchical-linear", {}) for method in ("powersgd:rank=2,cols=50", "thc:block=64", "topk_chunked")),
    ("powersgd:rank=2,cols=50", "hierarchical-linear", {"feedback": "none"}),
]


@pytest.mark.parametrize("method, route, feedback", PASSES)
def test_passes_whose_tiles_and_chunks_end_elsewhere(world, monkeypatch, method, route, feedback):
    """Chunks of the window end inside of blocks, so encodes lag behind the sums, and decodes go ahead.

    Summaries are made tile by tile; without feedback, no residual holds what they are made of.
    """
    monkeypatch.setattr(passes, "TILE", 512)
    options = {"compressor": method, "route": route, "window_bytes": 8192, "message_bytes": 256, **feedback}
    for nodes in node_layouts(world.size)[1::2]:
        faults, executors = differences(world, monkeypatch, nodes, **options)
        assert not faults
        (mine,) = (node for node in nodes if world.rank in node)
        together = {how for name, how in executors.items() if name != "alone"}
        assert all(("Python" in how) == (len(mine) == 1) for how in together), executors
        assert "Python" not in executors["alone"]


@pytest.fixture
def reads(world, monkeypatch):
    """Ranks of a node read each other's memory in all dense collectives of routes, not in long ones only.

    Returns whether a rank has another one to read from, on some of these nodes.
    """
    if not all(world.allgather(bool(probe(world)))):
        pytest.skip("the system does not let ranks read each other's memory")
    monkeypatch.setattr(transport_module, "read_limit", lambda *given: 0.0)
    return lambda rank, layouts: any(len(node) > 1 for nodes in layouts for node in nodes if rank in node)


BY_READS = ("hierarchical-allgather", "hierarchical-alltoall-packed")
"""What is decoded after a dense reduce-scatter: the own region, which the others read then; all regions."""


@pytest.mark.parametrize(
    "method, route",
    [
        *itertools.product(["onebit:block=192", "topk:ratio=0.1"], BY_READS),
        ("powersgd:rank=2,cols=50", "hierarchical-linear"),
    ],
)
def test_ranks_that_read_the_memory_of_others(world, monkeypatch, request, method, route):
    """The bits, the state and the bytes are those of the window, in both executors."""
    monkeypatch.setattr(passes, "TILE", 512)
    options, layouts = {"compressor": method, "route": route, "message_bytes": 256}, node_layouts(world.size)[1::2]
    by_window = [run_of(world, monkeypatch, "compiled", nodes=nodes, **options)[0] for nodes in layouts]
    reads, run, ran = request.getfixturevalue("reads"), WindowKernels._by_reads, []
    monkeypatch.setattr(WindowKernels, "_by_reads", lambda self, *given: ran.append(self) or run(self, *given))
    for nodes, expected in zip(layouts, by_window):
        assert not differences(world, monkeypatch, nodes, **options)[0]
        same = run_of(world, monkeypatch, "compiled", nodes=nodes, **options)[0] == expected
        assert all(world.allgather(same))
    assert bool(ran) == reads(world.rank, layouts), "Python has not read"


@pytest.mark.parametrize("way", ["python", "compiled"])
def test_a_read_that_fails_on_one_rank_is_an_error_on_all_ranks(world, monkeypatch, reads, way):
    monkeypatch.setenv(EXECUTOR, way)
    options = {"compressor": "onebit", "route": "hierarchical-allgather", "min_bytes": 0, "timeout": 60}
    session = Session(world, nodes=node_layouts(world.size)[1], **options)
    if world.rank == 0:
        nobody = SingleCopy((2**22 + 1,) * len(session._transport.node), "made up")
        session._transport.single_copy = session._transport.window_on_host(session._transport.node).single = nobody
    with pytest.raises(EspressoError, match="reading the memory of another rank: No such process") as caught:
        session.sync(values(world.rank, 0, 5003))
    assert isinstance(caught.value, TransportError if world.rank == 0 else RemoteError)


@pytest.mark.parametrize("by", ["window", "reads"])
@pytest.mark.parametrize(
    "method, route",
    [
        ("onebit", "hierarchical-allgather"), ("onebit", "hierarchical-alltoall-packed"), ("onebit", "flat-alltoall"),
        ("powersgd", "hierarchical-linear"),
        ("randomk:ratio=0.5", "encode@cpu/allreduce@intra/reduce_scatter@inter/allgather@inter/decode@cpu"),
    ],
)  # fmt: skip
def test_a_rank_that_needs_python_among_others_that_do_not(world, monkeypatch, request, method, route, by):
    """Several segments at once, and a dense tensor between them: all ranks make the same progress steps."""
    if by == "reads":
        request.getfixturevalue("reads")
    options = {"compressor": method, "route": route, "segment_bytes": 100, "message_bytes": 64, "min_bytes": 0}
    results = []
    for alone in (None, world.size - 1):
        if world.rank == alone:
            for module in (executor, bucket_program):
                monkeypatch.setattr(module, "obstacle", lambda x, job: "a test")
        with Session(world, seed=3, timeout=60, dense=["d"], nodes=node_layouts(world.size)[1], **options) as session:
            grads = {name: values(world.rank, 0, 2001) for name in ("a", "d", "b")}
            for _ in range(2):
                handles = [session.push(name, array) for name, array in grads.items()]
                [handle.wait() for handle in handles]
            results.append({name: array.tobytes() for name, array in grads.items()})
            ways = world.allgather({session.executors[name].startswith("table") for name in "ab"})
        assert ways == [{rank != alone} for rank in range(world.size)]
    assert results[0] == results[1]


@pytest.mark.parametrize("feedback", ["ef21", "plain:decay=0.9"])
def test_what_tables_lack_runs_in_python_and_is_said(open_session, world, feedback):
    session = open_session(compressor="onebit", feedback=feedback)
    session.sync({"w": values(world.rank, 0, 1000)})
    assert session.executors == {"w": f"Python: feedback {feedback}"}


@pytest.mark.parametrize("layout", [0, 2], ids=["window", "messages"])
def test_a_rank_that_is_late_inside_a_table_is_named(world, monkeypatch, layout):
    """An encode without a kernel runs in Python, so one rank can be late there: after the agreement, in the table."""
    last, encode, waits = world.size - 1, WithoutKernels._encode_cpu, [3]

    def late(*arguments):
        if world.rank == last and waits:  # for the first of its parts
            time.sleep(waits.pop())
        encode(*arguments)

    options = {"compressor": WithoutKernels.name, "min_bytes": 0, "timeout": 1}
    session = Session(world, nodes=node_layouts(world.size)[layout], **options)
    session.sync({"w": values(world.rank, 0, 1000)})
    assert session.executors["w"].startswith("table of")
    monkeypatch.setattr(WithoutKernels, "_encode_cpu", late)
    with pytest.raises(RemoteError if world.rank == last else EspressoError) as caught:
        session.sync({"w": values(world.rank, 1, 1000)})
    texts = world.allgather(f"{type(caught.value).__name__}: {caught.value}")
    assert any(text.startswith("RankTimeoutError") and f"rank {last}" in text for text in texts[:last]), texts
    assert all("RankTimeoutError" in text for text in texts), texts  # who did not wait so long hears of it


def test_the_environment_variable_is_checked(world, monkeypatch):
    monkeypatch.setenv(EXECUTOR, "fast")
    with pytest.raises(ConfigError, match="ESPRESSO_EXECUTOR='fast'; expected compiled"):
        Session(world)


@pytest.mark.parametrize(
    ("method", "alone"),
    [("onebit", False), ("onebit", True), ("dgc:ratio=0.1", False)],
    ids=["one node", "each on its node", "a state"],
)
def test_a_call_whose_payload_has_been_shown_in_vain_leaves_the_residual(world, open_session, method, alone):
    """After a first step, every rank encodes before the headers meet; here they differ, and later agree."""
    layout = {"nodes": [[rank] for rank in range(world.size)], "route": "flat-allgather"} if alone else {}
    session, twin = (open_session(compressor=method, seed=7, **layout) for _ in range(2))
    for step in range(3):
        first, second = values(world.rank, step, 900), values(world.rank, step + 10, 900)
        expected = [twin.sync({"w": first.copy()})["w"], twin.sync({"v": second.copy()})["v"]]
        calls = [("w", first), ("v", second)]
        if step == 2 and world.rank == 0:  # this rank alone pushes both at once: no rank can run either by itself
            calls.reverse()
        handles = {name: session.push(name, array) for name, array in calls}
        found = [handles[name].wait() for name in ("w", "v")]
        assert all((a == b).all() for a, b in zip(expected, found)), step
    for step in range(3, 6):
        array = values(world.rank, step, 900)
        if step == 4 and world.rank == world.size - 1:
            with pytest.raises(EspressoError):
                session.sync({"other": array})  # the others show the payload of "w"
        elif step == 4:
            with pytest.raises(EspressoError):
                session.sync({"w": array})
        else:
            expected = twin.sync({"w": array.copy()})["w"]
            assert (session.sync({"w": array})["w"] == expected).all(), step
    arrays = [one.state_dict()["arrays"] for one in (session, twin)]
    assert all((arrays[0][key] == value).all() for key, value in arrays[1].items())
