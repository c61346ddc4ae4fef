"""``ShardSync``: FSDP2 with compressed gradients and weights, against FSDP2 and GradientSync."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi import Session
from espresso_mpi.errors import ConfigError, NonFiniteError

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("espresso_mpi.torch")

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread", "group")]


class Network(torch.nn.Module):
    """Odd sizes, a frozen layer, and one that some ranks do not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(30, 37), torch.nn.Tanh(), torch.nn.Linear(37, 30)) for _ in "ab"]
        self.blocks, self.some = torch.nn.ModuleList(blocks), torch.nn.Linear(30, 30)
        self.frozen = torch.nn.Linear(30, 30).requires_grad_(False)

    def forward(self, x, use_some=True):
        for block in self.blocks:
            x = block(x) + x
        return self.frozen(x + self.some(x) if use_some else x)


def sharded(mesh=None):
    from torch.distributed.fsdp import fully_shard

    model = Network()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(world, model, after=lambda: None, steps=8, use=lambda step: True):
    """The loss in the end, and all weights."""
    optimizer, data = (
        torch.optim.SGD(model.parameters(), lr=0.05),
        torch.Generator(torch.get_default_device()).manual_seed(world.rank),
    )
    for step in range(steps):
        x = torch.randn(16, 30, generator=data)
        optimizer.zero_grad()
        loss = (model(x, use(step)) - torch.roll(x, 1, 1)).pow(2).mean()
        loss.backward()
        after()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return np.mean(world.allgather(loss.item())), torch.cat([p.detach().flatten() for p in whole])


def far(a, b):
    return float((a - b).norm() / b.norm())


def test_without_a_compressor_it_is_fsdp(world):
    model = sharded()
    sync = adapter.ShardSync(model)
    assert torch.equal(train(world, model)[1], train(world, sharded())[1])
    sync.close()


@pytest.mark.parametrize(("compressor", "weights"), [("int8", "none"), ("onebit", "none"), ("int8", "int8")])
def test_it_trains_as_gradient_sync_does(world, compressor, weights):
    dense = train(world, sharded())
    model, plain = sharded(), Network()
    sync = adapter.ShardSync(model, compressor=compressor, weights=weights)
    other = adapter.GradientSync(plain, compressor=compressor)
    loss, found = train(world, model)
    reference, expected = train(world, plain, other.wait)
    assert len({p.tobytes() for p in world.allgather(found.cpu().numpy())}) == 1
    assert abs(loss - reference) < 0.05 * reference and 0 < far(found, dense[1]) < 0.05
    assert far(found, expected) < (1e-3 if compressor == "int8" else 0.05)
    residuals = [key for key in sync.state_dict()["arrays"] if key.endswith("|0:" + key.split("|")[1] + "|residual")]
    assert len(residuals) == 3 and any("blocks.0.0.weight..blocks.0.2.bias" in key for key in residuals)
    sync.load_state_dict(sync.state_dict())
    sync.close()
    other.close()


def test_a_layer_that_a_rank_does_not_use(world):
    """Without ShardSync FSDP2 would send other sizes from these ranks."""
    model = sharded()
    sync = adapter.ShardSync(model, compressor="int8")
    _, found = train(world, model, steps=6, use=lambda step: (world.rank + step) % 2 == 0)
    assert len({p.tobytes() for p in world.allgather(found.cpu().numpy())}) == 1
    sync.close()


@pytest.mark.mpi(min_size=4)
def test_hybrid_sharding(world):
    from torch.distributed.device_mesh import init_device_mesh

    if world.size % 2:
        pytest.skip("needs pairs")
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    _, expected = train(world, sharded(mesh))
    sessions = [adapter.group_session(mesh.get_group(d), compressor="int8") for d in ("shard", "replicate")]
    model = sharded(mesh["shard"])
    adapter.ShardSync(model, sessions[0], replicas=sessions[1])
    _, found = train(world, model)
    assert len({p.tobytes() for p in world.allgather(found.cpu().numpy())}) == 1
    assert 0 < far(found, expected) < 1e-3
    assert any("some.weight" in key for key in sessions[1].state_dict()["arrays"])
    with pytest.raises(ConfigError, match=r"mesh\['shard'\]"):
        adapter.ShardSync(sharded(mesh), sessions[0], replicas=sessions[1])
    model = sharded()
    adapter.ShardSync(model, sessions[1])
    with pytest.raises(ConfigError, match="sharded over the ranks"):
        train(world, model, steps=1)
    for session in sessions:
        session.close()


def test_mistakes(world, open_session):
    session = open_session(compressor="int8")
    with pytest.raises(ConfigError, match="call fully_shard"):
        adapter.ShardSync(Network(), session)
    with pytest.raises(ConfigError, match="no session"):
        adapter.ShardSync(sharded(), session, compressor="int8")
    with pytest.raises(ConfigError, match="has a plan"):
        adapter.ShardSync(sharded(), open_session(plan="auto"))
    model = sharded()
    adapter.ShardSync(model, session)
    with pytest.raises(ConfigError, match="two models of one session"):
        adapter.ShardSync(sharded(), session)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(ConfigError, match="expected AVG or SUM"):
        train(world, model, steps=1)
    model = sharded()
    adapter.ShardSync(model, Session(compressor="int8"))
    with torch.no_grad():
        model.frozen.bias.to_local()[:] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN"):
        train(world, model, steps=1)
