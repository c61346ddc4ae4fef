"""Compressed tensors that share messages: each gets the bits, and keeps the state, that it has alone.

The other laws hold for buckets as well, because buckets are the default. Only this comparison finds a tensor that gets
blocks, keys, residuals or an order of sums which it would not have alone.
"""

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi import Plan, Route, Strategy, compressors
from espresso_mpi.collectives.messages.transport import Transport
from espresso_mpi.collectives.tables.running import TableRunner

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

WORLD = MPI.COMM_WORLD
SIZES = {"one": (1,), "few": (3,), "odd": (37, 7), "many": (70_001,), "none": (0,)}
TYPES = {"half": np.float16, "double": np.float64}


def shapes():
    """A tensor of every method, and some of one method that are special by their size or type."""
    found = dict.fromkeys(compressors.names(), (40, 25))
    return {**found, **SIZES, **dict.fromkeys(TYPES, (999,))}


def gradients(step):
    random = np.random.default_rng([WORLD.rank, step])
    return {name: random.standard_normal(s).astype(TYPES.get(name, np.float32)) for name, s in shapes().items()}


def plan(route):
    """Every tensor compressed by the method of its name, if its payloads can be summed where the route does it."""
    summed = Route.parse(route).sums_payloads
    names = {name for name in compressors.names() if not summed or compressors.get(name).linear}
    return Plan({n: Strategy(n if n in names else "randomk" if summed else "int4", route) for n in shapes()})


def pairs():
    ranks = list(range(WORLD.size))
    return [ranks[i : i + 2] for i in range(0, WORLD.size, 2)]


WAYS = {
    "flat-allgather": {},
    "flat-alltoall": {"nodes": [[rank] for rank in range(WORLD.size)]},
    "hierarchical-allgather": {"nodes": pairs()},
    "hierarchical-alltoall-packed": {"nodes": pairs(), "window_bytes": 0},
    "hierarchical-linear": {"nodes": pairs()},
    "encode@cpu/allreduce@flat/decode@cpu": {"nodes": [[rank] for rank in range(WORLD.size)]},
    "reduce@intra/encode@cpu/gather@inter/broadcast@inter/decode@cpu/broadcast@intra": {"nodes": pairs()},
}


@pytest.fixture
def posted(monkeypatch):
    """Counts exchanges of messages by Python, and runs of tables with messages; small calls made again are not."""
    count, post, progress = [0], Transport.post, TableRunner.progress

    def counted(self, sends, receives, workspace):
        count[0] += 1
        return post(self, sends, receives, workspace)

    def counted_run(self, run):
        count[0] += self.table.messages > 0
        return progress(self, run)

    monkeypatch.setattr(Transport, "post", counted)
    monkeypatch.setattr(TableRunner, "progress", counted_run)
    return count


@pytest.mark.parametrize("route", WAYS)
def test_a_tensor_has_the_bits_that_it_has_alone(route, posted, open_session):
    settings = {"window_bytes": 1 << 16, **WAYS[route], "plan": plan(route), "nonfinite": "skip"}
    results, states, posts = [], [], []
    for fuse_bytes in (0, 100_000):
        session = open_session(**settings, fuse_bytes=fuse_bytes)
        found, posted[0] = [], 0
        for step in range(3):
            grads = gradients(step)
            if step == 1 and WORLD.rank == 0:
                grads["int8"][3] = np.nan
            if step == 2:
                for name, grad in grads.items():
                    session.push(name, grad)
                session.wait_all()
            else:
                session.sync(grads)
            if step == 1:  # which tensors that are pushed share messages depends on when each of them comes
                posts.append(posted[0])
            found.append({name: grad.tobytes() for name, grad in grads.items()})
        results.append(found)
        states.append(session.state_dict())
        assert set(session.stats().tensors) >= set(shapes()) - {"none"}
        session.close()
    for apart, shared in zip(*results):
        assert [name for name in apart if apart[name] != shared[name]] == []
    np.testing.assert_equal(states[1], states[0])
    if route in ("flat-alltoall", "encode@cpu/allreduce@flat/decode@cpu"):
        assert posts[1] < posts[0] / 4


def test_pushes_use_memory_for_messages_again(open_session, monkeypatch):
    """A step makes some only if more is under way at once than ever before."""
    calls, made, steps = Transport.calls, [], 12

    def counted(self, *given):
        made.append(given)
        return calls(self, *given)

    monkeypatch.setattr(Transport, "calls", counted)
    session = open_session(nodes=[[rank] for rank in range(WORLD.size)])
    for step in range(steps):
        x = np.full(300_000, step + WORLD.rank, np.float32)
        session.push("x", x)
        session.wait_all()
        assert set(x.tolist()) == {step + (WORLD.size - 1) / 2}
    assert 0 < len(made) < steps
