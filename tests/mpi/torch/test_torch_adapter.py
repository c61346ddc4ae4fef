"""``espresso_mpi.torch``: GradientSync, the DDP hook, replicas, and the process group."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi import Plan, Session, Strategy, Tuning
from espresso_mpi.engine.engine import Engine
from espresso_mpi.errors import ConfigError, EspressoError, GradientError, MismatchError, RankTimeoutError, RemoteError

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("espresso_mpi.torch")
overlap = pytest.importorskip("espresso_mpi.torch.overlap")
distributed = torch.distributed

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(5)])


class Uneven(torch.nn.Module):
    """Tied weights, a layer that nobody uses, one that rank 0 alone uses, a buffer of integers."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.embed, self.inner = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)
        self.unused, self.some = torch.nn.Linear(4, 4), torch.nn.Linear(16, 16)
        self.norm, self.head = torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 50)
        self.head.weight = self.embed.weight

    def forward(self, x, use_some):
        h = self.embed(x)
        h = h + self.some(h) if use_some else h
        return self.head(self.norm(torch.relu(self.inner(h))))


@pytest.mark.parametrize("compressor, static", [("none", False), ("onebit", True), ("topk", False)])
def test_hook_and_gradient_sync_have_the_bits_of_sync(world, group, open_session, compressor, static):
    """Also when DDP has rebuilt its buckets, after the first step: residuals are found by the parameter's name; and
    where the graph is static: in the first step, DDP then calls the hook after the backward pass."""
    models = [network() for _ in range(4)]
    sessions = [open_session(compressor=compressor, min_bytes=0) for _ in models]
    ddp = torch.nn.parallel.DistributedDataParallel(models[0], bucket_cap_mb=0.01, static_graph=static)
    ddp.register_comm_hook(sessions[0], adapter.ddp_hook)
    pushing = adapter.GradientSync(models[1], sessions[1])
    at_once = adapter.GradientSync(models[3], sessions[3], overlap=False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    data = torch.Generator(torch.get_default_device()).manual_seed(world.rank)
    for _ in range(4):
        x = torch.randn(8, 40, generator=data)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in (ddp, *models[1:]):
            model(x).pow(2).sum().backward()
        pushing.wait()
        at_once.wait()
        sessions[2].sync({name: p.grad for name, p in models[2].named_parameters()})
        for a, b, c, d in zip(*(model.parameters() for model in models)):
            assert torch.equal(b.grad, c.grad) and torch.equal(a.grad, c.grad) and torch.equal(d.grad, c.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_the_way_is_chosen_in_the_first_steps_and_alike(world, open_session):
    """A session with a plan is not tried: its plan is for one way."""
    model = network()
    sync = adapter.GradientSync(model, open_session(compressor="onebit", min_bytes=0))
    ways = []
    for _ in range(18):
        model.zero_grad()
        ways.append(sync._overlap.now)
        assert sync.overlaps is (None if len(ways) <= 16 else ways[16])
        model(torch.ones(4, 40)).sum().backward()
        sync.wait()
    assert {True, False} == set(ways[:16]) and ways[16] == ways[17] == sync._overlap.now
    assert len(set(world.allgather(sync._overlap.now))) == 1
    planned = adapter.GradientSync(network(), open_session(plan=Plan(default=Strategy("int8", "flat-allgather"))))
    assert planned.overlaps is True
    held = Plan(default=Strategy("int8", "flat-allgather"), held=True)
    assert adapter.GradientSync(network(), open_session(plan=held)).overlaps is False
    with pytest.raises(ConfigError, match="expected True, False or 'auto'"):
        adapter.GradientSync(network(), open_session(), overlap="maybe")


class Shortened(torch.nn.Module):
    """As many layers as it is told to use."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x, count):
        return self.layers[:count](x)


@pytest.mark.parametrize("pushed", [1.0, 3.0])
def test_only_the_time_since_the_first_gradient_says_whether_to_push(world, open_session, monkeypatch, pushed):
    """A held step takes 2 seconds here. Whatever lies between the steps takes longer, and longer before held ones."""
    now = [0.0]
    monkeypatch.setattr(overlap, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    decision = overlap.Overlap("auto", open_session())
    for step in range(16):
        now[0] += 10.0 if decision.now else 20.0 + step
        decision.begin()
        now[0] += pushed if decision.now else 2.0
        decision.step_ended()
    assert decision.settled and decision.now is (pushed < 2.0)


def test_the_hook_finds_out_when_buckets_travel(world, group, open_session):
    """Alike on all ranks; also where a rank uses no parameter of a bucket."""
    models, sessions = [Shortened(), Shortened()], [open_session(compressor="int8", min_bytes=0) for _ in range(2)]
    ddp = torch.nn.parallel.DistributedDataParallel(models[0], bucket_cap_mb=0.005, find_unused_parameters=True)
    ddp.register_comm_hook(sessions[0], adapter.ddp_hook)
    ways, x = [], torch.full((4, 40), 1.0 + world.rank)
    for step in range(20):
        count = 5 - (step + world.rank) % 5
        ways.append(adapter.ddp.overlaps(sessions[0]))
        for model, run in zip(models, (ddp, models[1])):
            model.zero_grad()
            run(x, count).sum().backward()
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in models[1].named_parameters()}
        sessions[1].sync(expected)
        if count == 5:  # DDP leaves alone what was not used on this rank
            assert all(torch.equal(p.grad, expected[n]) for n, p in models[0].named_parameters())
    assert ways[:16] == [None] * 16 and ways[16] is ways[19] is not None
    assert len(set(world.allgather(ways[19]))) == 1


def test_ranks_that_have_no_more_batches(world, group, open_session):
    """torch's ``join`` gives the hook buckets of zeros, outside of a backward pass, held or not."""
    model, session = network(world.rank), open_session()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
    ddp.register_comm_hook(session, adapter.ddp_hook)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.01), 0
    with ddp.join():
        for _ in range(20 - 2 * (world.size - 1 - world.rank)):
            optimizer.zero_grad()
            ddp(torch.full((4, 40), 1.0 + world.rank)).pow(2).mean().backward()
            optimizer.step()
            steps += 1
    adapter.check_replicas(model, session)
    assert steps > 13 and len(set(world.allgather(adapter.ddp.overlaps(session)))) == 1


def test_a_plan_says_when_buckets_travel(group, open_session):
    for held in (False, True):
        session = open_session(plan=Plan(default=Strategy("int8", "flat-allgather"), held=held))
        model = network()
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
        ddp.register_comm_hook(session, adapter.ddp_hook)
        assert adapter.ddp.overlaps(session) is None
        ddp(torch.ones(4, 40)).sum().backward()
        assert adapter.ddp.overlaps(session) is not held


def test_plans_change_when_gradients_travel_and_no_bit(world, open_session):
    """Between two steps; a step that has begun goes on as it began."""
    default = Strategy("int8", "flat-allgather")
    plans = [Plan(default=default, held=True), Plan(default=default), Plan(default=default, held=True)]
    session, models = open_session(plan=plans[0]), [network(), network()]
    sync, other = adapter.GradientSync(models[0], session), open_session(plan=plans[1])
    for plan in plans:
        session.follow(plan)
        for model in models:
            model.zero_grad()
            model(torch.full((4, 40), 1.0 + world.rank)).sum().backward()
        assert bool(sync._handles) is not plan.held
        sync.wait()
        other.sync({name: p.grad for name, p in models[1].named_parameters()})
        assert sync.overlaps is not plan.held
        for a, b in zip(*(model.parameters() for model in models)):
            assert torch.equal(a.grad, b.grad)


def test_compressed_steps_are_watched_as_dense_ones_are(world, open_session):
    """A plan that holds pushes sends all gradients by one call, but while steps are watched the time of each counts."""
    if world.size == 1:
        pytest.skip("alone there is nothing to plan")
    model, tuning = network(), Tuning(("int8",), skip=1, steps=4, budget=60.0)
    sync = adapter.GradientSync(model, open_session(plan="auto", tuning=tuning))
    session = sync.session
    for step in range(5):
        model(torch.full((4, 40), 1.0 + world.rank)).sum().backward()
        sync.wait()
        calls = session._clock._calls
        calls[-1] = calls[-1].shifted(-10.0 * (step == 0))  # as if it had waited for a slow network
    assert session.watching and session.plan.held and sync.overlaps
    assert all(one.pushed and len(set(one.ready)) == len(one.specs) for one in session._clock.steps)
    sync.close()


def test_ranks_of_different_branches_see_the_same_steps_while_plans_are_tried(world, open_session, monkeypatch):
    """A rank may have no gradient of any tensor that had one before, and waits for what others have."""
    if world.size == 1:
        pytest.skip("alone there is nothing to plan")
    monkeypatch.setattr(adapter.gradient_sync, "TOGETHER", 0)
    branches = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(3))
    tuning = Tuning(("int8",), skip=1, steps=3, seconds=0.3, share=1)
    sync, step = adapter.GradientSync(branches, open_session(plan="auto", tuning=tuning, timeout=60)), 0
    while sync.session.planning:
        branches.zero_grad()
        odd = not sync.session.watching and step % 3 == 0
        branches[2 if odd and world.rank else (step + world.rank) % 2](torch.full((2, 40), 1.0)).sum().backward()
        sync.wait()
        biases = [branch.bias.grad for branch in branches if branch.bias.grad is not None]
        assert abs(sum(float(bias.mean()) for bias in biases) - 2) < 0.05
        step += 1
    assert len(set(world.allgather((step, sync.session.plan.digest)))) == 1
    sync.close()


def test_a_loop_with_accumulation_and_uneven_use(world):
    model = Uneven(world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = adapter.GradientSync(model, compressor="int8")
    adapter.check_replicas(model, sync.session)
    data = torch.Generator(torch.get_default_device()).manual_seed(100 + world.rank)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randint(0, 50, (8,), generator=data)
            with sync.no_sync() if micro == 0 else contextlib.nullcontext():
                torch.nn.functional.cross_entropy(model(x, world.rank == 0 and step % 2 == 0), x).backward()
        sync.wait()
        assert model.unused.weight.grad is None
        assert (model.some.weight.grad is not None) == (step % 2 == 0)
        optimizer.step()
    adapter.average_buffers(model, sync.session)
    adapter.check_replicas(model, sync.session)
    file = io.BytesIO()
    torch.save(sync.state_dict(), file)
    file.seek(0)
    sync.load_state_dict(torch.load(file, weights_only=True))
    sync.close()


def test_frozen_parameters_that_thaw_are_found(world):
    model = network()
    model[0].requires_grad_(False)
    sync = adapter.GradientSync(model)
    for frozen in (True, False):
        model.zero_grad()
        model[0].requires_grad_(not frozen)
        model(torch.full((2, 40), float(world.rank))).sum().backward()
        mine = model[4].bias.grad.clone() if frozen else None
        sync.wait()
        assert (model[0].weight.grad is None) == frozen
        assert mine is None or torch.isfinite(mine).all()
        grads = world.allgather([p.grad.cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None])
        assert all(other == grads[0] for other in grads)
    sync.close()


def test_scaled_losses_are_skipped_together(world):
    """An overflow on one rank leaves the step out on all, and all scalers go on with the same scale."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    sync = adapter.GradientSync(model, compressor="int8", scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.full((2, 40), 0.1 * (world.rank + 1))).pow(2).mean()
        overflow = step == 2 and world.rank == world.size - 1
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        sync.wait()
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
        assert changed == (step != 2)
    assert len(set(world.allgather(scaler.get_scale()))) == 1
    adapter.check_replicas(model, sync.session)
    sync.close()
    session = Session(world)
    with pytest.raises(ConfigError, match="skip_all"):
        adapter.GradientSync(model, session, scaler=scaler)
    session.close()


def test_the_hook_follows_a_scaler(world, group, open_session):
    """The residuals have the scale of the gradients, as those of GradientSync."""
    models, scalers = [network(), network()], [torch.amp.GradScaler("cpu", 2.0, growth_interval=1) for _ in range(2)]
    sessions = [open_session(compressor="int4", min_bytes=0, nonfinite="skip_all") for _ in models]
    ddp = torch.nn.parallel.DistributedDataParallel(models[0])
    ddp.register_comm_hook(sessions[0], adapter.ddp_hook)
    adapter.follow_scaler(sessions[0], scalers[0])
    sync = adapter.GradientSync(models[1], sessions[1], scaler=scalers[1])
    x = torch.full((4, 40), 1.0 + world.rank)
    for _ in range(4):
        for model, run, scaler in zip(models, (ddp, models[1]), scalers):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            optimizer.zero_grad()
            scaler.scale(run(x).pow(2).mean()).backward()
            if model is models[1]:
                sync.wait()
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    kept = [session.state_dict()["arrays"] for session in sessions]
    assert kept[0] and all(np.array_equal(value, kept[1][key]) for key, value in kept[0].items())
    with pytest.raises(ConfigError, match="another GradScaler"):
        adapter.follow_scaler(sessions[0], scalers[1])
    with pytest.raises(ConfigError, match="skip_all"):
        adapter.follow_scaler(open_session(), scalers[0])
    scalers[1].scale(models[1](x).pow(2).mean()).backward()
    scalers[1].unscale_(optimizer)
    with pytest.raises(GradientError, match=r"unscale_\(\) came before wait\(\)"):
        sync.wait()


def test_a_step_that_failed_is_over(world, open_session):
    model, session = network(), open_session()
    sync, x = adapter.GradientSync(model, session), torch.ones(4, 40)
    if world.size > 1:
        model[2].weight.requires_grad_(world.rank > 0)
        model(x).sum().backward()
        with pytest.raises(MismatchError, match="freeze the same parameters on every rank"):
            sync.wait()
        model[2].weight.requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    sync.wait()


def test_a_dropped_gradient_sync_keeps_no_model_alive(open_session):
    session = open_session()
    for _ in range(2):  # with the same names
        model = network()
        sync = adapter.GradientSync(model, session)
        weak = weakref.ref(model)
        del model, sync
        gc.collect()
        assert weak() is None
    model = network()
    adapter.GradientSync(model, session)
    gc.collect()
    with pytest.raises(GradientError, match="its GradientSync is gone"):
        model(torch.ones(4, 40)).sum().backward()


def test_forgotten_waits_and_other_mistakes(world, open_session):
    model = network()
    sync = adapter.GradientSync(model)
    model(torch.ones(2, 40)).sum().backward()
    with pytest.raises(GradientError, match=r"call wait\(\)"):
        model(torch.ones(2, 40)).sum().backward()
    with pytest.raises(GradientError, match="its memory was changed"):  # by the second backward pass
        sync.wait()
    with pytest.raises(ConfigError, match="no session"):
        adapter.GradientSync(model, sync.session, compressor="int8")
    with pytest.raises(ConfigError, match="no parameter"):
        adapter.GradientSync(torch.nn.ReLU())
    sync.close()
    if world.size > 1:
        with pytest.raises(MismatchError, match=r"check_replicas.*'0\.weight'"):
            adapter.check_replicas(network(world.rank), open_session())


def test_what_was_meant_is_said(world, open_session):
    session, model = open_session(), network()
    for given, text in (
        (model, "GradientSync"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "an optimizer"),
        (dict(model.named_parameters()), "holds weights"),
    ):
        with pytest.raises(GradientError, match=text):
            session.sync(given)
    session.sync({name: p.detach() for name, p in model.named_parameters()})


def test_a_copy_of_a_model_shares_its_session(world, open_session):
    model = network()
    model.session = open_session()
    assert copy.deepcopy(model).session is model.session


def test_the_end_of_a_with_block_closes_what_was_opened(world, open_session):
    session, failed = open_session(), world.rank == world.size - 1
    with adapter.GradientSync(torch.nn.Linear(3, 2), session):
        pass
    assert session.usable
    with adapter.GradientSync(torch.nn.Linear(3, 2)) as sync:
        own = sync.session
    assert not own.usable

    def leave():
        with sync:
            if failed:
                raise ValueError("no more data")
            sync.session.barrier()

    sync = adapter.GradientSync(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError if failed else RemoteError, match="no more data"):
        leave()
    assert not sync.session.usable


def test_attached_to_an_optimizer(world):
    model = network()
    sync = adapter.GradientSync(model, broadcast=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 40), float(world.rank))).sum().backward()
        optimizer.step()
    adapter.check_replicas(model, sync.session)
    sync.close()


def test_attached_to_an_optimizer_that_calls_a_closure(world):
    """Gradients exist after the closure only, which this optimizer calls several times in a step."""
    model, whole = network(), network()
    sync = adapter.GradientSync(model, overlap=False)
    data = [torch.randn(8, 40, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    optimizers = [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, whole)]
    sync.attach(optimizers[0])

    def closure(m, optimizer, batches):
        optimizer.zero_grad()
        loss = sum(m(x).square().mean() for x in batches) / len(batches)
        loss.backward()
        return loss

    for _ in range(2):
        optimizers[0].step(lambda: closure(model, optimizers[0], [data[world.rank]]))
        optimizers[1].step(closure=lambda: closure(whole, optimizers[1], data))
    gap = max(float((p - q).abs().max()) for p, q in zip(model.parameters(), whole.parameters()))
    moved = max(float((p - q).abs().max()) for p, q in zip(model.parameters(), network().parameters()))
    sync.close()
    assert all(world.allgather(gap < 1e-4 < moved / 10))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_mean_of_an_earlier_step_is_not_sent_again(world, overlap):
    """Two losses of parts of a model in turns, as of a GAN: what one leaves in ``grad`` is none of the other's step."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 40), "b": torch.nn.Linear(40, 40)})
    sync = adapter.GradientSync(model, compressor="onebit", min_bytes=0, overlap=overlap)
    sent = []
    for parts in ["a", "b", "a", "b", "ab", "ab"]:  # the first time, headers name the tensors
        before = sync.session.stats().bytes_by_level
        for part in parts:
            model[part].zero_grad()
            model[part](torch.full((2, 40), float(world.rank))).sum().backward()
        sync.wait()
        sent.append(sum(sync.session.stats().bytes_by_level.values()) - sum(before.values()))
    found = []
    for in_place in (False, True):  # no hook tells of it
        by_hand = torch.full_like(model["b"].bias, float(world.rank + 1))
        if in_place:
            model["b"].bias.grad.copy_(by_hand)
        else:
            model["b"].bias.grad = by_hand
        model["a"].zero_grad()
        model["a"](torch.ones(2, 40)).sum().backward()
        sync.wait()
        found.append(model["b"].bias.grad.tolist())
    model["a"](torch.ones(2, 40)).sum().backward()
    model.zero_grad()  # too early; what was on its way is dropped
    with contextlib.suppress(GradientError):
        sync.wait()
    sync.close()
    assert all(world.allgather(sent[3] < 0.8 * sent[5]))
    assert len({str(one) for one in world.allgather(found)}) == 1


def test_two_models_of_one_session_cannot_share_residuals(world, group, open_session):
    session = open_session(compressor="onebit", min_bytes=0)
    sync = adapter.GradientSync(network(), session)
    with pytest.raises(ConfigError, match="two models of one session"):
        adapter.GradientSync(network(1), session)
    ddp = torch.nn.parallel.DistributedDataParallel(network(2))
    ddp.register_comm_hook(session, adapter.ddp_hook)
    with pytest.raises(ConfigError, match="two models of one session"):
        ddp(torch.ones(2, 40)).sum().backward()
    sync.close()
    with pytest.raises(ConfigError, match="was closed"):
        sync.wait()
    adapter.GradientSync(network(1), session).close()


# --- the process group ------------------------------------------------------------------------------------------------


def test_operations_of_the_process_group(world, group):
    rank, size = world.rank, world.size
    x = torch.full((1000,), float(rank + 1))
    works = [distributed.all_reduce(y, async_op=True) for y in (x, x.to(torch.bfloat16), torch.full((3,), rank))]
    for work in works:
        work.wait()
    assert torch.all(x == size * (size + 1) / 2)
    for op, expected in (("MAX", size), ("MIN", 1), ("PRODUCT", np.prod(np.arange(1, size + 1)))):
        y = torch.tensor([rank + 1])
        distributed.all_reduce(y, op=getattr(distributed.ReduceOp, op))
        assert y.item() == expected
    parts = [torch.empty(3) for _ in range(size)]
    distributed.all_gather(parts, torch.full((3,), float(rank)))
    assert [int(part[0]) for part in parts] == list(range(size))
    whole, mine = torch.arange(4.0 * size), torch.empty(4)
    distributed.reduce_scatter_tensor(mine, whole)
    assert torch.equal(mine, size * whole[4 * rank : 4 * rank + 4])
    out = torch.empty(size)
    distributed.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    assert torch.equal(out, torch.arange(float(size)) * 10 + rank)
    said = [None] * size
    distributed.all_gather_object(said, {"rank": rank})
    assert said[-1] == {"rank": size - 1}
    given = [torch.full((2,), float(k)) for k in range(size)] if rank == 0 else None
    got = torch.empty(2)
    distributed.scatter(got, given, src=0)
    assert torch.all(got == rank)
    distributed.barrier()


def test_what_torch_waits_for_at_once_is_made_by_its_thread(world, group, monkeypatch):
    """Beside operations that it does not wait for, in the order in which all are called."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("the short way is one of host memory")
    short, repeat = [], Engine.repeat

    def counted(self, *arguments):
        short.append(threading.current_thread() is threading.main_thread())
        return repeat(self, *arguments)

    monkeypatch.setattr(Engine, "repeat", counted)
    size = world.size
    x, others = torch.empty(500), [torch.empty(70) for _ in range(3)]
    for step in range(6):
        works = []
        for number, other in enumerate(others):
            other.fill_(world.rank + number + step)
            works += [distributed.all_reduce(other, async_op=True)] if step > 3 else []
        x.fill_(world.rank + step)
        assert distributed.all_reduce(x) is None
        assert x.unique().tolist() == [sum(range(size)) + step * size]
        for number, (other, work) in enumerate(zip(others, works)):
            work.wait()
            assert other.unique().tolist() == [sum(range(size)) + (step + number) * size]
    assert len(short) >= 3 and all(short)
    options = distributed.AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([x.fill_(1)], options)
    assert work.is_completed() and work.is_success() and work.exception() is None and work.wait()
    assert work.result()[0] is x and work.get_future().wait()[0] is x and x.unique().tolist() == [size]


def test_messages_and_new_groups(world, group):
    rank, size = world.rank, world.size
    if size > 1:
        if rank == 0:
            distributed.send(torch.arange(3.0), 1, tag=5)
        if rank == 1:
            got = torch.zeros(3)
            assert distributed.recv(got, None, tag=5) == 0
            assert torch.equal(got, torch.arange(3.0))
        pair = distributed.new_group([0, 1])
        if rank < 2:
            x = torch.ones(2)
            distributed.all_reduce(x, group=pair)
            assert torch.all(x == 2)
    everyone = distributed.new_group(list(range(size)))
    x = torch.ones(2)
    distributed.all_reduce(x, group=everyone)
    assert torch.all(x == size)


def test_another_default_device_changes_nothing(world, group):
    """What the process group makes for itself is in host memory, whatever torch's default is."""
    rank, before = world.rank, torch.get_default_device()
    whole, counts = torch.zeros(4, 2), torch.sparse_coo_tensor([[rank]], [2.0], (world.size,))
    torch.set_default_device("meta")
    try:
        distributed.barrier()
        if rank == 0:
            distributed.send(whole[:, 0] + 3, 1)
        if rank == 1:
            distributed.recv(whole[:, 0], 0)
        distributed.all_reduce(counts)
    finally:
        torch.set_default_device(before)
    assert whole[:, 0].tolist() == [3 * (rank == 1)] * 4
    assert counts.to_dense().tolist() == [2] * world.size


def test_ddp_fully_shard_and_zero(world, group):
    """They train to what DDP over the mean of all gradients gives."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, ddp, sharded, zero = (network() for _ in range(4))
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    wrapped = [torch.nn.parallel.DistributedDataParallel(model) for model in (ddp, zero)]
    makes = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, ddp, sharded)]
    makes.append(ZeroRedundancyOptimizer(zero.parameters(), torch.optim.SGD, lr=1e-3))
    data = torch.Generator(torch.get_default_device()).manual_seed(world.rank)
    for _ in range(3):
        x = torch.randn(8, 40, generator=data)
        for optimizer in makes:
            optimizer.zero_grad()
        for model in (plain, wrapped[0], sharded, wrapped[1]):
            model(x).pow(2).sum().backward()
        for p in plain.parameters():
            distributed.all_reduce(p.grad, op=distributed.ReduceOp.AVG)
        for optimizer in makes:
            optimizer.step()
    for a, b, c, d in zip(*(m.parameters() for m in (plain, ddp, sharded, zero))):
        assert torch.allclose(a, b, atol=1e-5) and torch.allclose(a, d, atol=1e-5)
        assert torch.allclose(a, c.full_tensor(), atol=1e-5)


def test_the_environment_is_that_of_torchrun(world, group):
    """accelerate and others take the device from it; and a mean of integers is refused, as by gloo."""
    known = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    on_node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert known["RANK"] == str(world.rank) and known["WORLD_SIZE"] == str(world.size)
    assert (known["LOCAL_RANK"], known["LOCAL_WORLD_SIZE"]) == (str(on_node.rank), str(on_node.size))
    on_node.Free()
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    with pytest.raises(ConfigError, match=r"op='mean' of int64; .*use op='sum'"):
        distributed.all_reduce(torch.ones(3, dtype=torch.int64), op=distributed.ReduceOp.AVG)


def test_operations_on_the_same_and_on_strided_memory(world, group):
    size, rank = world.size, world.rank
    x, part = torch.arange(60000.0 * size), torch.empty(60000)
    whole = torch.empty(size * x.numel())
    works = [distributed.reduce_scatter_tensor(part, x, async_op=True)]
    works.append(distributed.all_gather_into_tensor(whole, x, async_op=True))
    assert all(work.wait() for work in works)
    assert torch.equal(whole, x.repeat(size)), "the sums were visible in the input"
    strided = torch.arange(12.0).reshape(3, 4).t() + rank
    parts = [torch.empty(4, 3) for _ in range(size)]
    distributed.all_gather(parts, strided)
    assert all(torch.equal(part, strided - rank + k) for k, part in enumerate(parts))


def test_strided_results_and_lists_of_a_wrong_length(world, group):
    size, mine = world.size, float(world.rank + 1)
    ranks = torch.arange(1.0, size + 1)

    def strided(rows):
        return torch.zeros(3, rows).t()

    out = strided(2 * size)
    distributed.all_gather_single(out, torch.full((2, 3), mine))
    assert torch.equal(out, ranks.repeat_interleave(2)[:, None].expand(2 * size, 3))
    out = strided(size)
    distributed.all_to_all_single(out, torch.full((size, 3), mine))
    assert torch.equal(out, ranks[:, None].expand(size, 3))
    out = strided(2)
    distributed.reduce_scatter_single(out, torch.full((2 * size, 3), mine))
    assert torch.equal(out, torch.full((2, 3), ranks.sum().item()))
    parts = [torch.full((2, 3), mine + other) for other in range(size)] if world.rank == 0 else None
    distributed.scatter(out, parts, 0)
    assert torch.equal(out, torch.full((2, 3), mine))
    distributed.all_to_all_single(torch.zeros(2 * size, 0), torch.zeros(2 * size, 0), [2] * size, [2] * size)
    wrong = [torch.zeros(3)] * (size + 1)
    for call in (
        lambda: distributed.all_gather(wrong, torch.zeros(3)),
        lambda: distributed.reduce_scatter(torch.zeros(3), wrong),
        lambda: distributed.all_to_all(wrong, wrong),
    ):
        with pytest.raises(ConfigError, match=f"a list of {size + 1} tensors; expected {size}"):
            call()


def test_nothing_in_the_process_group_waits_for_ever(world, group):
    parts = [torch.empty(4) for _ in range(world.size)]
    with pytest.raises(RuntimeError, match="shape"):
        distributed.all_gather(parts, torch.ones(5), async_op=True).wait()
    with pytest.raises(RankTimeoutError, match="message to be received"):
        group.recv([torch.empty(3)], world.rank, 99).wait(timedelta(seconds=0.2))


def test_a_destroyed_group_leaves_no_thread(world, group):
    distributed.barrier()
    before = threading.active_count()
    for _ in range(3):
        everyone = distributed.new_group(list(range(world.size)))
        distributed.all_reduce(torch.ones(2), group=everyone, async_op=True).wait()
        distributed.destroy_process_group(everyone)
    assert threading.active_count() <= before


def test_an_error_of_a_collective_comes_out_of_backward(world, group):
    """Where DDP waits for a future that has failed, it must not take the error for gradients."""
    model = torch.nn.parallel.DistributedDataParallel(network())
    if world.size > 1:
        work = distributed.all_reduce(torch.ones(3 + world.rank), async_op=True)
        with pytest.raises(EspressoError, match="ranks disagree"):
            work.wait()
        with pytest.raises(RuntimeError, match="ranks disagree"):
            work.get_future().wait()
    model(torch.ones(2, 40)).sum().backward()


@pytest.mark.parametrize(("kind", "rule"), [("SGD", "sgd"), ("AdamW", None)])
def test_a_session_that_plans_for_itself_learns_of_the_optimizer(world, open_session, kind, rule):
    """What it does not know it judges for Adam."""
    if world.size == 1:
        pytest.skip("alone there is nothing to plan")
    model = network()
    sync = adapter.GradientSync(model, open_session(plan="auto", accuracy="balanced"))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    model(torch.ones(2, 40)).sum().backward()
    sync.wait()
    optimizer.step()
    assert sync.session._tuner.fidelity.rule == rule
    assert sync.session._tuner.fidelity.accuracy == "balanced"
    sync.close()


def test_options_of_plans_reach_the_session_of_gradient_sync(world):
    with pytest.raises(ConfigError, match="accuracy='best'; expected 'safe' or 'balanced' or 'fast'"):
        adapter.GradientSync(network(), plan="auto", accuracy="best")
