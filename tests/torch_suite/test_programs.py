"""Programs of torch run unchanged over the process group "espresso"; four ranks."""

from __future__ import annotations

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")
pytest.importorskip("espresso_mpi.torch")
distributed = torch.distributed

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.timeout(300)]


@pytest.fixture
def group(world, tmp_path_factory):
    """The default process group of one test."""
    folder = world.bcast(str(tmp_path_factory.mktemp("store")) if world.rank == 0 else None)
    distributed.init_process_group("espresso", f"file://{folder}/store", rank=world.rank, world_size=world.size)
    yield distributed.group.WORLD
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_groups_are_destroyed_and_made_again(world, group, tmp_path):
    """Each frees its communicator, of which MPI has a limited number; shutting down twice does nothing."""
    for number in range(3):
        everyone, unused = distributed.group.WORLD, distributed.new_group()
        x = torch.ones(2)
        distributed.all_reduce(x)
        assert torch.all(x == world.size)
        distributed.destroy_process_group()
        assert everyone._comm == MPI.COMM_NULL and unused._comm == MPI.COMM_NULL
        everyone.shutdown()
        assert not distributed.is_initialized()
        store = world.bcast(f"file://{tmp_path}/{number}" if world.rank == 0 else None)
        distributed.init_process_group("espresso", store, rank=world.rank, world_size=world.size)


def test_fully_shard_on_a_mesh_and_a_distributed_checkpoint(world, group, tmp_path):
    """Two replicas of two shards train to what all ranks train alone, and a checkpoint brings the weights back."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def network():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded, plain = fully_shard(network(), mesh=mesh), network()
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(0)
        for _ in range(3):
            every = torch.randn(world.size, 8, generator=data)
            optimizer.zero_grad()
            model(every if model is plain else every[world.rank : world.rank + 1]).pow(2).mean().backward()
            optimizer.step()
    for a, b in zip(sharded.parameters(), plain.parameters()):
        assert torch.allclose(a.full_tensor(), b, atol=1e-6)
    folder = world.bcast(str(tmp_path))
    checkpoint.save(get_model_state_dict(sharded), checkpoint_id=folder)
    again = fully_shard(network(), mesh=mesh)
    state = get_model_state_dict(again)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)
    for a, b in zip(again.parameters(), sharded.parameters()):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_sparse_embeddings_train_as_dense_ones(world, group):
    """Also where the ranks' elements differ in number, and a rank has none in common with the others."""
    ddp = []
    for sparse in (True, False):
        torch.manual_seed(2)
        ddp.append(torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(50, 4, sparse=sparse)))
    for model in ddp:
        model(torch.arange(world.rank + 1) + 10 * (world.rank == 3)).pow(2).sum().backward()
    sparse, dense = (model.module.weight.grad for model in ddp)
    assert sparse.is_sparse
    assert torch.allclose(sparse.to_dense(), dense)


def test_a_barrier_that_is_waited_for_later(world, group):
    """Until the wait, its rank sends what another rank receives before it comes to the barrier."""
    if world.rank == 1:
        got = torch.zeros(1)
        distributed.recv(got, 0)
    work = distributed.barrier(async_op=True)
    if world.rank == 0:
        distributed.send(torch.ones(1), 1)
    work.wait()


def test_a_callback_may_wait_for_another_future(world, group):
    """Futures that only the thread of a callback could end would wait for ever, as in torch's PowerSGD."""

    def second(_):
        return distributed.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]

    first = distributed.all_reduce(torch.ones(1), async_op=True).get_future()
    assert first.then(second).wait() == world.size
