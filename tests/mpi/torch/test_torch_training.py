"""What torch training does to a session: accumulated gradients, loss scaling, layouts. Skipped without torch."""

from __future__ import annotations

import numpy as np
import pytest
from rank_errors import last, raised, several

import espresso_mpi
from espresso_mpi.errors import GradientError, RemoteError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


# --- tensors that are changed on their way ----------------------------------------------------------------------------


@several
@pytest.mark.parametrize("compressor", ["none", "int8"])
@pytest.mark.parametrize("flat", [False, True], ids=["of its own", "view of a flat buffer"])
def test_a_second_backward_pass_before_the_wait(world, compressor, flat):
    """The gradients that hooks have pushed are added to: whoever wins the race, it is an error on every rank."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(300, 300)
    session = espresso_mpi.Session(compressor=compressor, min_bytes=0, timeout=60)
    if flat:
        buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
        parts = buffer.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts):
            p.grad = part.view_as(p)
    for name, p in model.named_parameters():

        def hook(p, name=name):
            session.push(name, p.grad)

        p.register_post_accumulate_grad_hook(hook)

    def step():
        for seed in (0, 1):
            torch.manual_seed(2 * world.rank + seed)
            model(torch.randn(8, 300)).square().mean().backward()
        session.wait_all()

    error = raised(step)
    assert isinstance(error, GradientError | RemoteError), error
    assert "wait_all()" in str(error) and ("weight" in str(error) or "bias" in str(error)), error


@several
@pytest.mark.parametrize("what", ["torch", "zeroed", "finished", "checksums"])
def test_a_change_on_one_rank_is_heard_on_all(world, what):
    torch = pytest.importorskip("torch")
    session = espresso_mpi.Session(compressor="int8", min_bytes=0, timeout=60, debug=what == "checksums")
    memory = np.ones(1 << 16, np.float32)
    tensor = memory if what == "checksums" else torch.zeros(1 << 16)
    handle = session.push("layer.weight", tensor)
    if what == "finished":  # also when the mean is there already: else it would be an error now and then
        while not handle._call.finished:
            pass
        world.Barrier()
    if last(world) and what == "zeroed":
        torch._foreach_zero_([tensor])
    elif last(world):
        tensor += 1

    def go_on():
        handle.wait()
        for number in range(1000):
            session.sync({str(number): np.ones(9, np.float32)})

    error = raised(go_on)
    assert isinstance(error, GradientError if last(world) else RemoteError), error
    assert "layer.weight" in str(error) and "changed" in str(error), error
    assert "layer.weight" in str(raised(lambda: session.sync(np.ones(3, np.float32)))), "the session has failed"


def test_what_is_no_change_is_no_error(world, open_session):
    torch = pytest.importorskip("torch")
    session = open_session(compressor="int8")
    flat = torch.full((2000,), float(world.rank))
    one, other = flat[:1000], flat[1000:]
    first = session.push("one", one)
    other.add_(1)  # the parts of a storage share a counter
    second = session.push("other", other)
    with torch.inference_mode():
        counterless = torch.full((10,), float(world.rank))
    third = session.push("inference", counterless)
    for handle in (first, second, third):
        handle.wait()
    assert first.done()
    one.add_(1)  # it is ours again
    session.push("one", one).wait()
    mean = (world.size - 1) / 2
    assert torch.allclose(flat, torch.full((2000,), mean + 1), rtol=0.02)
    assert torch.allclose(counterless, torch.full((10,), mean), rtol=0.02)


@several
@pytest.mark.parametrize("how", ["zero_grad", "copies"])
def test_a_mean_that_nobody_reads(world, open_session, caplog, how):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    session = open_session()
    model(torch.ones(3, 50)).sum().backward()
    for name, p in model.named_parameters():
        session.push(name, p.grad if how == "zero_grad" else p.grad.clone())
    if how == "zero_grad":
        model.zero_grad()
    session.wait_all()
    assert caplog.text.count("its mean is lost") == 1


def test_a_mean_that_somebody_reads(world, open_session):
    torch = pytest.importorskip("torch")
    session, expected = open_session(), torch.full((30,), (world.size - 1) / 2)

    def fresh():
        return torch.full((30,), float(world.rank))

    p, memory, kept, viewed, detached = torch.nn.Parameter(fresh()), fresh().numpy(), fresh(), fresh(), fresh()
    p.grad = fresh()
    handle = session.push("by handle", fresh())
    session.push("gradient", p.grad)
    session.push("numpy's", torch.from_numpy(memory))
    session.push("kept", kept)
    session.push("viewed", viewed.view(5, 6))
    session.push("detached", detached.detach())
    session.wait_all()
    found = [p.grad, torch.from_numpy(memory), kept, viewed, detached, handle.wait()]
    assert all(torch.equal(tensor, expected) for tensor in found)


@pytest.mark.parametrize("compressor", ["none", "int8"])
def test_debug_mode_gives_the_same_bits(world, open_session, compressor):
    def run(debug):
        rng = np.random.default_rng(world.rank)
        grads = {
            "wide": rng.standard_normal(50_000).astype(np.float32),
            "narrow": rng.standard_normal(5_000),
            "small": rng.standard_normal(10).astype(np.float32),
            "strided": rng.standard_normal((40, 30)).astype(np.float32).T,
        }
        session = open_session(compressor=compressor, debug=debug, min_bytes=1000)
        for _ in range(2):
            session.sync(grads)
            handles = [session.push(name, grad) for name, grad in grads.items()]
            [handle.wait() for handle in handles]
        session.sync({"small": grads["small"]})  # by itself it would go along with the header
        return grads

    plain, checked = run(False), run(True)
    assert all(np.array_equal(plain[name], checked[name]) for name in plain)


# --- loss scaling -----------------------------------------------------------------------------------------------------


class Learner:
    """A small classifier that is trained with a loss scaler."""

    def __init__(self, torch, world, session):
        torch.manual_seed(5)
        self.torch, self.rank, self.session = torch, world.rank, session
        self.model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, number, broken=False):
        """The order of docs/torch.md."""
        torch, scaler = self.torch, self.scaler
        generator = torch.Generator(torch.get_default_device()).manual_seed(100 * number + self.rank)
        x = torch.randn(32, 20, generator=generator)
        loss = torch.nn.functional.cross_entropy(self.model(x), (x[:, 0] > 0).long())
        self.optimizer.zero_grad()
        scaler.scale(loss).backward()
        if broken:
            self.model[2].weight.grad[0, 0] = float("inf")
        self.session.sync({name: p.grad for name, p in self.model.named_parameters()})
        scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scaler.step(self.optimizer)
        before = scaler.get_scale()
        scaler.update()
        self.session.rescale(scaler.get_scale() / before)
        return loss.item()

    def replica(self):
        return b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())


def test_a_loss_scaler_hears_of_an_infinity_on_another_rank(world, open_session):
    torch = pytest.importorskip("torch")
    session = open_session(compressor="int4", nonfinite="skip_all")
    learner = Learner(torch, world, session)
    losses = [learner.step(number) for number in range(10)]
    before, memory = learner.replica(), session.state_dict()
    learner.step(10, broken=last(world))
    after = session.state_dict()
    assert set(world.allgather(learner.scaler.get_scale())) == {512.0}
    assert learner.replica() == before, "the step was taken"
    assert session.stats().skipped_calls == 1
    assert session.stats().skipped == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 1)
    assert after["counts"] == memory["counts"]
    halves = {key: value / 2 for key, value in memory["arrays"].items()}
    assert halves and all(np.array_equal(after["arrays"][key], half) for key, half in halves.items())
    losses += [learner.step(number) for number in range(11, 40)]
    assert len(set(world.allgather(learner.replica()))) == 1
    assert np.mean(losses[-5:]) < 0.6 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_call_that_is_skipped_is_skipped_whole(world, open_session, dtype):
    """Pushed one by one only that tensor is, with those of its group; what else is under way gets its mean."""
    torch = pytest.importorskip("torch")
    way = espresso_mpi.Strategy("int8", "flat-allgather")
    dense = espresso_mpi.Strategy("none", "flat")
    plan = espresso_mpi.Plan({"a": way, "b": way}, default=dense, groups=(("a", "b"),), fuse_bytes=1 << 20)
    session = open_session(plan=plan, nonfinite="skip_all")

    def fresh():
        return {name: torch.full((50, 20), float(world.rank), dtype=getattr(torch, dtype)) for name in "abcd"}

    session.sync(fresh())
    kept, grads = session.state_dict(), fresh()
    if last(world):
        grads["d"][3, 4] = float("nan")
    session.sync(grads)
    assert all(grad.isnan().all() for grad in grads.values())
    grads = fresh()
    if last(world):
        grads["b"][3, 4], grads["d"][0, 0] = float("inf"), float("-inf")
    for name, grad in grads.items():
        session.push(name, grad)
    session.wait_all()
    assert all(grads[name].isnan().all() for name in "abd")
    assert torch.allclose(grads["c"].float(), torch.tensor((world.size - 1) / 2))
    after = session.state_dict()
    assert all(np.array_equal(after["arrays"][key], value) for key, value in kept["arrays"].items())
    assert after["counts"] == kept["counts"]
    assert session.stats().skipped_calls == 3 and session.stats().skipped == {"a": 2, "b": 2, "c": 1, "d": 2}


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_a_channels_last_network(world, open_session, caplog):
    """Gradients that are strided on some ranks and not on others: the mean lands in the gradients themselves."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    layout = torch.contiguous_format if world.rank == 0 else torch.channels_last
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=layout)
    x = torch.full((2, 3, 9, 9), float(world.rank + 1)).to(memory_format=layout)
    model(x).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    strides = {name: grad.stride() for name, grad in grads.items()}
    assert world.rank == 0 or not grads["0.weight"].is_contiguous()
    mine = {name: grad.contiguous().cpu().numpy().copy() for name, grad in grads.items()}
    expected = {name: np.mean(world.allgather(grad), axis=0) for name, grad in mine.items()}
    session = open_session()
    caplog.set_level("INFO", "espresso_mpi")
    assert session.sync(grads) is grads
    for name, p in model.named_parameters():
        assert p.grad is grads[name] and p.grad.stride() == strides[name]
        assert np.allclose(p.grad.cpu().numpy(), expected[name], rtol=1e-5, atol=1e-7), name
    handle = session.push("0.weight", model[0].weight.grad)
    assert handle.wait() is model[0].weight.grad
    assert sum("strided" in record.message for record in caplog.records) == (world.rank > 0), "said once"
    assert np.allclose(model[0].weight.grad.cpu().numpy(), expected["0.weight"], rtol=1e-5, atol=1e-7)
