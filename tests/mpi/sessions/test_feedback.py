"""What becomes of what compression loses: the kinds of feedback, against simulations of all ranks in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from session_cases import COMPRESSED, exact_mean, held, identical, layouts_seen_by, values

from espresso_mpi import Feedback
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, MismatchError
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
N = 1537
TOPK = "topk:ratio=0.1"


def compressed(x):
    """What the others see of x."""
    compressor, x = get(TOPK), x.astype(np.float32)
    payload, out = np.empty(compressor.nbytes(x.size), np.uint8), np.empty_like(x)
    compressor.encode(x, payload)
    compressor.decode(payload, out)
    return out


def synced(session, rank, steps):
    out = []
    for step in range(steps):
        grad = values(rank, step, N)
        session.sync(grad)
        out.append(grad)
    return out


def ranks_that_compress(world):
    if world.size == 1:
        pytest.skip("one rank compresses nothing")
    return range(world.size)


def test_plain_feedback_with_decay(world, open_session):
    """p = g + 0.5 e, e = p - C(p)."""
    ranks = ranks_that_compress(world)
    session = open_session(compressor=TOPK, route="flat-allgather", feedback="plain:decay=0.5")
    error = {r: np.zeros(N, np.float32) for r in ranks}
    for step, grad in enumerate(synced(session, world.rank, 6)):
        sent = []
        for r in ranks:
            p = values(r, step, N) + np.float32(0.5) * error[r]
            sent.append(compressed(p))
            error[r] = p - sent[-1]
        assert np.allclose(grad, np.mean(sent, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [1.0, 0.25])
def test_ef21(world, open_session, momentum):
    """h += C(v - h), the step is the mean of h; v = (1 - η)v + ηg: in float64 but for C."""
    ranks = ranks_that_compress(world)
    session = open_session(compressor=TOPK, route="flat-allgather", feedback=Feedback("ef21", momentum=momentum))
    h, v = ({r: np.zeros(N) for r in ranks} for _ in range(2))
    for step, grad in enumerate(synced(session, world.rank, 8)):
        for r in ranks:
            v[r] = (1 - momentum) * v[r] + momentum * values(r, step, N)
            h[r] = h[r] + compressed((v[r] - h[r]).astype(np.float32))
        assert np.allclose(grad, np.mean(list(h.values()), 0), rtol=1e-5, atol=1e-6)
        assert identical(world, grad)


@pytest.mark.parametrize("route", COMPRESSED)
def test_ef21_arrives_at_a_constant_gradient(world, open_session, route):
    """Plain feedback circles around it, EF21 comes to rest there; also where the means are compressed again."""
    ranks_that_compress(world)
    for nodes in layouts_seen_by(route, world.size):
        session = open_session(compressor=TOPK, route=route, nodes=nodes, feedback="ef21", segment_bytes=900)
        for _ in range(60):
            grad = values(world.rank, 0, N)
            session.sync(grad)
        assert np.abs(grad - exact_mean(world.size, 0, N)).max() < 1e-5
        assert identical(world, grad)


@pytest.mark.parametrize("route", COMPRESSED)
def test_nothing_is_lost_while_the_ratio_changes(world, open_session, route):
    """A schedule changes the payload's size, not the pieces that residuals belong to."""
    ranks_that_compress(world)
    for nodes in layouts_seen_by(route, world.size):
        session = open_session(compressor="topk:ratio=0.5~0.02@12/4", route=route, nodes=nodes, segment_bytes=100)
        given, got, sent = np.zeros(N), np.zeros(N), [0]
        for step in range(16):
            grad = values(world.rank, step, N)
            given += exact_mean(world.size, step, N)
            session.sync(grad)
            got += grad
            sent.append(world.allreduce(session.stats().wire_bytes))
        bytes_by_step = np.diff(sent)
        assert np.abs(given - got - held(world, session, N, nodes)).max() < 1e-4
        fewer = np.diff(bytes_by_step[::3])
        encodes = len(nodes) > 1 or "packed" in route or "intra" not in str(Route.parse(route))
        assert (fewer[:4] < 0).all() if encodes else not fewer[1:].any()  # the first step also brings descriptions
        assert fewer[4] == 0
        assert len({key for key in session.state_dict()["arrays"] if "|0|" in key}) <= 40


@pytest.mark.parametrize("feedback", ["plain", "ef21"])
@pytest.mark.parametrize(
    "compressor, cure",
    [
        ("qsgd:levels=1,block=2048", "use 'qsgd:levels=1,block=2048,scaled=True'"),
        ("randomk:ratio=0.1,scaled=true", "use 'randomk:ratio=0.1'"),
        ("signsgd", "use feedback='none'"),
    ],
)
def test_what_would_diverge_is_refused(world, feedback, compressor, cure):
    from espresso_mpi import Session

    with pytest.raises(ConfigError, match=f"may grow without bound; {cure}"):
        Session(world, compressor=compressor, feedback=feedback, timeout=60)


@pytest.mark.parametrize("feedback", ["plain:decay=0", "ef21:decay=0.5", "plain:momentum=0.5", "more", "plain:x=1", 7])
def test_values_that_do_not_fit_are_refused(feedback):
    with pytest.raises(ConfigError, match="feedback"):
        Feedback.of(feedback)


def test_ranks_must_choose_the_same(world):
    from espresso_mpi import Session

    ranks_that_compress(world)
    kinds = ["plain", "ef21"]
    with pytest.raises(MismatchError, match="feedback"):
        Session(world, compressor="onebit", feedback=kinds[world.rank % 2], timeout=60)


@pytest.mark.parametrize("spec", ["auto", "none", "plain", "plain:decay=0.5", "ef21", "ef21:momentum=0.25"])
def test_spec_reads_back(spec):
    assert str(Feedback.of(spec)) == spec
    assert Feedback.of(Feedback.of(spec)) == Feedback.of(spec)
