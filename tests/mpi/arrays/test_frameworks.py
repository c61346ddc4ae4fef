"""Arrays of other frameworks, each skipped where the framework is not installed."""

from __future__ import annotations

import os
import time
from collections import namedtuple

import numpy as np
import pytest

from espresso_mpi import Session
from espresso_mpi.errors import GradientError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.mark.parametrize("compressor", ["none", "onebit", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_torch_tensors_in_place(world, open_session, dtype, compressor):
    torch = pytest.importorskip("torch")
    tensor = torch.full((40, 50), float(world.rank), dtype=getattr(torch, dtype))
    pointer = tensor.data_ptr()
    grads = {"w": tensor}
    assert open_session(compressor=compressor).sync(grads)["w"] is tensor
    assert tensor.data_ptr() == pointer
    assert torch.allclose(tensor.float(), torch.full((40, 50), (world.size - 1) / 2), atol=1e-2)


def test_torch_gradients_in_memory_that_ranks_share(world, open_session):
    torch = pytest.importorskip("torch")
    session, model = open_session(), torch.nn.Linear(400, 300)
    flat = torch.from_numpy(session.empty(sum(p.numel() for p in model.parameters())))
    grads = dict(zip("wb", (g.view_as(p) for g, p in zip(flat.split([120000, 300]), model.parameters()))))
    for call in (session.sync, session.sync, lambda grads: session.allreduce(flat)):
        flat.fill_(world.rank)
        call(grads)
        assert torch.all(flat == (world.size - 1) / 2)


def test_torch_gradients_of_a_model(world, open_session):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model(torch.full((5, 20), float(world.rank + 1))).sum().backward()
    expected = [torch.from_numpy(np.mean(world.allgather(p.grad.numpy().copy()), axis=0)) for p in model.parameters()]
    open_session().sync([p.grad for p in model.parameters()])
    assert all(torch.allclose(p.grad, e, rtol=1e-5) for p, e in zip(model.parameters(), expected))


@pytest.mark.parametrize(
    "make", ["ones(5).expand(4, 5)", "ones(8).to_sparse()", "ones(4, dtype=torch.int32)", "ones(4, device='meta')"]
)
def test_torch_tensors_that_cannot_be_synchronised(world, open_session, make):
    torch = pytest.importorskip("torch")
    with pytest.raises(GradientError, match="expected"):
        open_session().sync(eval(f"torch.{make}", {"torch": torch}))


@pytest.fixture(scope="module")
def jax():
    """JAX with two devices, which the host plays both: it is asked how many there are when it is first used."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    return pytest.importorskip("jax")


@pytest.mark.parametrize("compressor", ["none", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_come_back_new(world, open_session, jax, dtype, compressor):
    array = jax.numpy.full((3, 100), float(world.rank), dtype=dtype)
    mutable = np.full(7, float(world.rank), np.float32)
    result = open_session(compressor=compressor).sync({"w": array, "rest": (mutable, None)})
    assert isinstance(result["w"], jax.Array) and result["w"].dtype == array.dtype and result["w"].shape == array.shape
    assert np.allclose(np.asarray(result["w"], np.float32), (world.size - 1) / 2, atol=1e-2)
    assert np.all(np.asarray(array, np.float32) == world.rank), "the immutable input was written to"
    assert result["rest"][0] is mutable and result["rest"][1] is None


Layer = namedtuple("Layer", "weight bias")


def test_jax_trees_come_back_in_their_shape_where_they_were(world, open_session, jax):
    """Containers of all kinds; arrays on the second device, over both, of two dimensions, of none, in bfloat16."""
    first, second = jax.devices()[:2]
    over_both = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array([first, second]), ("x",)), jax.sharding.PartitionSpec("x")
    )
    rng = np.random.default_rng(world.rank)
    makes = {"second": second, "both": over_both, "scalar": first}
    shapes = {"second": (3, 5), "both": (8, 300), "scalar": ()}
    host = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays = {name: jax.device_put(host[name], makes[name]) for name in makes}
    half = jax.device_put(host["both"], first).astype(jax.numpy.bfloat16)
    tree = {"layers": [Layer(arrays["second"], arrays["scalar"]), Layer(arrays["both"], None)], "rest": (half,)}
    result = open_session().sync(tree)

    assert jax.tree.structure(result) == jax.tree.structure(tree)
    new = dict(zip(("second", "scalar", "both"), jax.tree.leaves(result["layers"])))
    for name, array in new.items():
        expected = np.mean(world.allgather(host[name].astype(np.float64)), axis=0)
        np.testing.assert_allclose(np.asarray(array), expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert array.sharding == arrays[name].sharding and array.devices() == arrays[name].devices()
        assert np.array_equal(np.asarray(arrays[name]), host[name]), "the immutable input was written to"
    assert result["rest"][0].dtype == jax.numpy.bfloat16
    sums = np.mean(world.allgather(np.asarray(half, np.float64)), axis=0)
    np.testing.assert_allclose(np.asarray(result["rest"][0], np.float64), sums, rtol=2**-8, atol=1e-6)


def test_jax_arrays_are_pushed_and_waited_for(world, open_session, jax):
    """Two steps with feedback: results are new arrays, those of the step before stay what they were."""
    session, steps = open_session(compressor="onebit", min_bytes=0), []
    kept = np.zeros(5000)
    for step in range(2):
        arrays = {name: jax.numpy.arange(5000.0) * (world.rank + 1 + step) for name in ("a", "b")}
        handles = [session.push(name, array) for name, array in arrays.items()]
        results = [handle.wait() for handle in handles]
        assert all(isinstance(result, jax.Array) for result in results)
        assert np.array_equal(np.asarray(arrays["a"]), np.arange(5000.0) * (world.rank + 1 + step))
        steps.append((results[0], np.asarray(results[0]).copy()))
        assert np.array_equal(np.asarray(results[0]), world.bcast(np.asarray(results[0]))), "ranks differ"
        kept += steps[-1][1]
    assert all(np.array_equal(np.asarray(array), copy) for array, copy in steps)
    true = sum(np.arange(5000.0) * (np.mean(range(world.size)) + 1 + step) for step in range(2))
    assert np.corrcoef(kept, true)[0, 1] > 0.5


def test_a_traced_array_is_refused_on_every_rank(world, open_session, jax):
    session = open_session()
    with pytest.raises(GradientError, match=r"use espresso_mpi\.jax\.sync"):
        jax.jit(lambda x: session.sync(x) if world.rank == 0 else session.sync(np.ones(4, np.float32)))(
            jax.numpy.ones(4)
        )


def test_ml_dtypes_bfloat16(world, open_session):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    grad = np.full(100, world.rank, ml_dtypes.bfloat16)
    open_session().sync(grad)
    assert np.allclose(grad.astype(np.float32), (world.size - 1) / 2, atol=1e-2)


class Foreign:
    """An array that offers nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_in_place(world, open_session):
    memory = np.full(33, world.rank, np.float32)
    open_session().sync([Foreign(memory)])
    assert np.allclose(memory, (world.size - 1) / 2)


def test_bfloat16_rounds_to_nearest_even(world, open_session):
    """Against numpy in float64: the mean of bfloat16 values, rounded once."""
    bits = np.random.default_rng(world.rank).integers(0x3F00, 0x4100, 500).astype(np.uint16)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    grad = bits.view(ml_dtypes.bfloat16).copy()
    exact = np.mean([g.astype(np.float64) for g in world.allgather(grad.copy())], axis=0)
    open_session(route="flat").sync(grad)
    nearest = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert np.count_nonzero(grad != nearest) <= 1, "only a float32 rounding that crosses a tie may differ"


@pytest.mark.timeout(60)
def test_a_process_group_of_torch_may_follow_another_at_once(world, monkeypatch):
    """A rank that is ahead must not take the store of the group before for its own: rank 0 has yet to end it."""
    distributed = pytest.importorskip("torch.distributed")
    made = pytest.importorskip("espresso_mpi.torch").process_group.ProcessGroup
    shutdown = made.shutdown

    def late(group):
        shutdown(group)
        time.sleep(0.3 if world.rank == 0 else 0)

    monkeypatch.setattr(made, "shutdown", late)
    for _ in range(2):
        distributed.init_process_group("espresso")
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"of rank {world.rank}", "here")
        assert [store.get(f"of rank {rank}") for rank in range(world.size)] == [b"here"] * world.size
        del store  # or rank 0 keeps its server
        distributed.destroy_process_group()


class Told(Foreign):
    """It also tells its shape and type, by which calls that come again are known."""

    def __init__(self, array):
        super().__init__(array)
        self.shape, self.dtype = array.shape, array.dtype

    def __setitem__(self, where, values):
        self._array[where] = np.from_dlpack(values)


def torch_of(array):
    return pytest.importorskip("torch").from_numpy(array.copy()).clone()


def piggybacked(session):
    """The dense calls that have travelled with their headers."""
    return session._engine._dispatcher._dense.known


@pytest.mark.parametrize("make", [torch_of, Told], ids=["torch", "dlpack"])
def test_calls_that_come_again_are_those_of_numpy(world, open_session, make):
    """Rank 0 has numpy's arrays, the others have foreign ones: all take the short way, with the same bits."""
    make(np.zeros(1, np.float32))  # without torch all ranks skip, rank 0 too
    session, plain, me = open_session(), open_session(), world.rank
    calls = {
        "allreduce": lambda s, x, out: s.allreduce(x),
        "sum": lambda s, x, out: s.allreduce(x, op="sum", out=out),
        "reduce": lambda s, x, out: s.reduce(x, root=1),
        "broadcast": lambda s, x, out: s.broadcast(x, root=1),
        "allgather": lambda s, x, out: s.allgather(x),
        "reduce_scatter": lambda s, x, out: s.reduce_scatter(x),
        "alltoall": lambda s, x, out: s.alltoall(x),
        "gather": lambda s, x, out: s.gather(x, root=1),
    }
    for what, call in calls.items():
        for step in range(4):
            n = 600 if step < 3 else 1200
            values = np.random.default_rng([step, me]).standard_normal((n, 2)).astype(np.float32)
            expected = call(plain, values.copy(), np.empty_like(values))
            x, out = (values.copy(), np.empty_like(values)) if me == 0 else (make(values), make(np.empty_like(values)))
            found = call(session, x, out)
            if what in ("allreduce", "broadcast", "sum"):
                assert found is (out if what == "sum" else x)
            if what in ("reduce", "gather") and me != 1:
                continue
            assert type(found) is type(x) or make is Told
            assert np.from_dlpack(found).tobytes() == expected.tobytes(), (what, step)
    assert len(piggybacked(session)) >= len(calls)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "uint8"])
def test_tensors_of_torch_that_come_again(world, open_session, dtype):
    """The types that numpy does not have, tensors that take another shape or memory, and what is no plain memory."""
    torch = pytest.importorskip("torch")
    session, kind = open_session(), getattr(torch, dtype)
    op = "mean" if dtype != "uint8" else "max"

    def mean(make):
        every = torch.stack([make(rank).float() for rank in range(world.size)])
        return every.mean(0) if op == "mean" else every.amax(0)

    makes = [
        lambda rank: torch.full((6, 50), 2.0 * rank + 1, dtype=kind),
        lambda rank: torch.full((50, 6), 2.0 * rank + 3, dtype=kind).t(),
        lambda rank: (torch.arange(300.0) % 8 + rank).to(kind).view(6, 50),
        lambda rank: (torch.arange(600.0) % 8 + rank).to(kind).view(6, 100)[:, ::2],
        lambda rank: torch.full((2, 6, 50), rank + 1.0, dtype=kind)[1],
    ]
    for step in range(15):
        make = makes[step % 5]
        x = make(world.rank)
        if step == 10 and dtype != "uint8":
            x.requires_grad_()
        strides, place = x.stride(), x.data_ptr()
        assert session.allreduce(x, op=op) is x
        assert (x.stride(), x.data_ptr()) == (strides, place)
        assert torch.equal(x.detach().float(), mean(make).to(kind).float()), step
        gathered = session.allgather(make(world.rank))
        assert gathered.dtype == kind and torch.equal(gathered, torch.cat([make(r) for r in range(world.size)]))
    x = torch.ones(6, 50, dtype=torch.int32)  # the same bytes as another type
    assert session.allreduce(x, op="sum").unique().tolist() == [world.size]


def test_a_change_by_another_thread_is_found(world):
    """Sessions in which it happened cannot be closed."""
    torch = pytest.importorskip("torch")
    session, x = Session(world, timeout=60), torch.ones(3000)
    for _ in range(3):
        session.allreduce(x)
    repeat = session._repeat

    def meanwhile(*arguments):
        found = repeat(*arguments)
        x.add_(1)
        return found

    session._repeat = meanwhile
    with pytest.raises(GradientError, match=r"changed by another thread.*allreduce"):
        session.allreduce(x)
    assert not session.usable
