"""The optimizers of ``espresso_mpi.torch`` on one rank: names, frozen parameters, states, copies."""

from __future__ import annotations

import copy

import pytest

from espresso_mpi import Session
from espresso_mpi.errors import ConfigError, StateError

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("espresso_mpi.torch")

OPTIMIZERS = {
    "OnebitAdam": {"warmup": 2},
    "OnebitLamb": {"warmup": 2},
    "ZeroOneAdam": {"warmup": 2, "double_every": 4},
    "MomentumSGD": {"lr": 0.01},
}


@pytest.fixture
def session():
    with Session(compressor="onebit", min_bytes=0) as opened:
        yield opened


def network(seed=0, width=6):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def steps(optimizer, model, count, first=0):
    for number in range(first, first + count):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_parameters_of_one_name_are_refused(name, session):
    """One would have taken the place of the other's message, and the replicas would have gone apart."""
    first, second = network(), network()
    groups = [{"params": list(m.named_parameters())} for m in (first, second)]
    with pytest.raises(ConfigError, match=f"{name}: two parameters are named '0.weight'"):
        getattr(adapter, name)(groups, session, **OPTIMIZERS[name])
    optimizer = getattr(adapter, name)(first.named_parameters(), session, **OPTIMIZERS[name])
    with pytest.raises(ConfigError, match=r"two parameters are named '0\.weight'"):
        optimizer.add_param_group({"params": list(second.named_parameters())})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match=r"0\.weight: two models of one session"):
        getattr(adapter, name)(second.named_parameters(), session, **OPTIMIZERS[name])
    del optimizer
    again = getattr(adapter, name)(first.named_parameters(), session, **OPTIMIZERS[name])
    steps(again, first, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_stay(name, session):
    """Also those that are frozen and thawed later, when v of the others is constant."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = getattr(adapter, name)(model.named_parameters(), session, weight_decay=0.5, **OPTIMIZERS[name])
    before = [p.clone() for p in model[0].parameters()]
    steps(optimizer, model, 8)
    assert all(torch.equal(p, old) for p, old in zip(model[0].parameters(), before))
    if hasattr(optimizer, "average"):
        optimizer.average()
    model[0].requires_grad_(True)
    last = model[2].weight.detach().clone()
    steps(optimizer, model, 6, first=8)
    moved = (model[0].weight - before[0]).abs().mean()
    usual = (model[2].weight - last).abs().mean()
    assert 0.02 * usual < moved < 5 * usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_to_the_bit_from_a_state_and_from_a_copy(name, dtype, session):
    model = network().to(dtype)
    torch.set_default_dtype(dtype)
    try:
        optimizer = getattr(adapter, name)(model.named_parameters(), session, **OPTIMIZERS[name])
        steps(optimizer, model, 5)
        if hasattr(optimizer, "average"):
            optimizer.average()
        twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        other, both = copy.deepcopy((model, optimizer)), []
        with Session(compressor="onebit", min_bytes=0) as second:
            second.load_state_dict(session.state_dict())
            loaded = getattr(adapter, name)(twin.named_parameters(), second, **OPTIMIZERS[name])
            loaded.load_state_dict(state)
            for m, o in [(model, optimizer), (twin, loaded), other]:
                steps(o, m, 4, first=5)
                both.append(m.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    for one in both[1:]:
        assert all(torch.equal(one[key], value) for key, value in both[0].items())
    kinds = {value.dtype for entry in loaded.state.values() for value in entry.values()}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_other_shapes_is_refused(name, session):
    """Kernels would write behind the end of its arrays."""
    model, wider = network(), network(width=9)
    optimizer = getattr(adapter, name)(model.named_parameters(), session, **OPTIMIZERS[name])
    steps(optimizer, model, 3)
    state = copy.deepcopy(optimizer.state_dict())
    with Session(compressor="onebit", min_bytes=0) as second:
        other = getattr(adapter, name)(wider.named_parameters(), second, **OPTIMIZERS[name])
        with pytest.raises(StateError, match=r"0\.weight: got .* of shape \(24,\); expected .* of shape \(36,\)"):
            other.load_state_dict(state)
        steps(other, wider, 3)
    next(iter(state["state"].values())).popitem()
    with pytest.raises(StateError, match=r"0\.weight: cannot read"):
        optimizer.load_state_dict(state)
    steps(optimizer, model, 3)


def test_lamb_moves_parameters_that_come_after_the_warm_up(session):
    model, late = network(), torch.nn.Linear(4, 2)
    optimizer = adapter.OnebitLamb(model.named_parameters(), session, lr=0.01, warmup=2)
    steps(optimizer, model, 4)
    optimizer.add_param_group({"params": list(late.named_parameters())})
    before = late.weight.detach().clone()
    for number in range(5):
        optimizer.zero_grad()
        torch.manual_seed(number)
        x = torch.randn(8, 4)
        (model(x) + late(x)).square().mean().backward()
        optimizer.step()
    moved = float((late.weight - before).norm() / before.norm())
    assert 0.005 < moved < 0.5
