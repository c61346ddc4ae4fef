"""The optimizers of ``espresso_mpi.torch`` on one rank: names, frozen parameters, states, copies."""

from __future__ import annotations

import copy

import pytest

from espresso_mpi import Session, optim
from espresso_mpi.errors import ConfigError, NonFiniteError, StateError

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


def test_names_are_free_again_when_an_optimizer_has_gone_or_was_refused(session):
    model, other = network(), network()
    both = [{"params": list(model.named_parameters())}, {"params": list(other.named_parameters())}]
    with pytest.raises(ConfigError):
        adapter.MomentumSGD(both, session)
    optimizer = adapter.MomentumSGD(other.named_parameters(), session)
    with pytest.raises(ConfigError, match="pass named_parameters"):
        adapter.MomentumSGD(model.named_parameters(), session)
    del optimizer
    steps(adapter.MomentumSGD(model.named_parameters(), session), model, 2)


def test_a_parameter_that_takes_the_place_of_another_has_its_name(session):
    model = network()
    optimizer = adapter.OnebitAdam(model.named_parameters(), session, warmup=2)
    steps(optimizer, model, 3)
    old, new = model[0].weight, torch.nn.Parameter(model[0].weight.detach().clone())
    model[0].weight = optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(old)
    steps(optimizer, model, 3)
    assert new.ne(old).any()
    model[0].weight = optimizer.param_groups[0]["params"][0] = last = torch.nn.Parameter(new.detach().clone())
    steps(optimizer, model, 3)  # by itself, with a variance of zero
    assert 1e-4 < (last - new).abs().max() < 0.1


def test_a_layer_that_is_frozen_between_local_steps_is_synchronised_with_them(session, monkeypatch):
    """What it has moved by itself, and nothing after it was frozen."""
    model, sent, sync = network(), [], session.sync
    adam = adapter.ZeroOneAdam(model.named_parameters(), session, warmup=2, double_every=2, longest=4)

    def watched(messages):
        sent.append(set(messages))
        return sync(messages)

    monkeypatch.setattr(session, "sync", watched)
    steps(adam, model, 8)
    before = model[0].weight.detach().clone()
    assert adam._rule.holds("0.weight")
    model[0].requires_grad_(False)
    steps(adam, model, 1, first=8)
    assert torch.equal(model[0].weight, before)
    adam.average()
    torch.testing.assert_close(model[0].weight, before, rtol=1e-4, atol=1e-5)
    assert "0.weight" in sent[-1] and not adam._rule.holds("0.weight")
    steps(adam, model, 8, first=9)
    assert "0.weight" not in sent[-1]


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"])
def test_a_layer_that_is_thawed_in_the_warm_up_begins_as_all_did(name, bad, session):
    """Adam's first step is as long as the learning rate, and those along the same gradient are as well."""
    model = torch.nn.ParameterList([torch.ones(64), torch.ones(64)])
    model[1].requires_grad_(False)
    optimizer = getattr(adapter, name)(model.named_parameters(), session, lr=0.01, weight_decay=0.0, warmup=40)
    lengths = []
    for step in range(60):
        if step == 36:
            model[1].requires_grad_(True)
        for parameter in model:
            parameter.grad = torch.full((64,), 0.5) if parameter.requires_grad else None
        if bad and step == 36:
            model[0].grad[0] = torch.nan
            with pytest.raises(NonFiniteError):
                optimizer.step()
            model[0].grad[0] = 0.5
        if step == 36 and name == "ZeroOneAdam":
            optimizer.average()  # no step of the new layer
        before = model[1].detach().clone()
        optimizer.step()
        lengths.append(float((before - model[1].detach()).mean()))
        if name == "ZeroOneAdam" and step == 40:
            optimizer.average()
        if step in (36, 40):
            optimizer.load_state_dict(optimizer.state_dict())
    usual = 0.01 if name != "OnebitLamb" else 0.01 * float(model[1].detach().mean())
    assert lengths[:36] == [0.0] * 36
    assert all(0.05 * usual < length < 1.5 * usual for length in lengths[36:]), lengths[36:]
    torch.testing.assert_close(optimizer.state[model[1]]["exp_avg_sq"], optimizer.state[model[0]]["exp_avg_sq"])
    if name == "OnebitLamb":
        one, other = (mean for mean, _ in optimizer.state_dict()["lamb_rule"]["coefficients"].values())
        assert other == pytest.approx(one, rel=0.5)


def test_an_average_moves_what_has_taken_local_steps_alone(session):
    model = network()
    adam = adapter.ZeroOneAdam(model.named_parameters(), session, warmup=2, double_every=2, longest=4)
    model[0].requires_grad_(False)
    steps(adam, model, 8)
    assert adam._rule.holds("2.weight")
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    adam.average()
    assert torch.equal(model[0].weight, before) and not adam._rule.holds("2.weight")
    steps(adam, model, 8, first=8)
    assert model[0].weight.ne(before).any()


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"])
def test_a_layer_that_is_thawed_alone_moves_as_the_others_did(name, session):
    """Of those that move, none has a variance: it is that of the layers that rest."""
    model = network()
    model[0].requires_grad_(False)
    options = {**OPTIMIZERS[name], "lr": 0.01}
    optimizer = getattr(adapter, name)(model.named_parameters(), session, **options)
    steps(optimizer, model, 4)
    if hasattr(optimizer, "average"):
        optimizer.average()
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    before = model[0].weight.detach().clone()
    steps(optimizer, model, 4, first=4)
    assert 1e-4 < (model[0].weight - before).abs().mean() < 0.2


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
        assert float((late.weight - before).norm() / before.norm()) == pytest.approx(0.01, rel=0.15)  # of the rate
        before = late.weight.detach().clone()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def trained(model, step, count, first=0):
    for number in range(first, first + count):
        torch.manual_seed(number)
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        step()


@pytest.mark.parametrize("sparse", [False, True])
def test_diloco_around_two_optimizers_is_that_of_plain_arrays(sparse):
    """With a scheduler, frozen parameters, and a state that another run goes on from."""
    kinds = {"compressor": "topk_in_chunks", "feedback": "plain:decay=0.95"} if sparse else {"compressor": "int4"}
    options = {"every": 4, "fragments": 2}
    runs = []
    with Session(min_bytes=0, **kinds) as session, Session(min_bytes=0, **kinds) as other:
        for plain in (True, False):
            model = network()
            model[0].bias.requires_grad_(False)
            local = [
                torch.optim.SGD(list(model[0].named_parameters("0")), lr=0.1, momentum=0.9),
                torch.optim.AdamW(list(model[2].named_parameters("2")), lr=0.01),
            ]
            if plain:
                params = {name: p for name, p in model.named_parameters() if p.requires_grad}
                core = optim.DiLoCo.sparse if sparse else optim.DiLoCo
                outer = core(params, session, **options)
                rates = [torch.optim.lr_scheduler.LinearLR(one, total_iters=8) for one in local]
                step = lambda: [*[o.step() for o in (*local, outer)], *[rate.step() for rate in rates]]  # noqa: E731, B023
            else:
                make = adapter.DiLoCo.sparse if sparse else adapter.DiLoCo
                outer = make(local, other, **options)
                rate = torch.optim.lr_scheduler.LinearLR(outer, total_iters=8)
                step = lambda: [outer.step(), rate.step()]  # noqa: E731, B023
            trained(model, step, 10)
            outer.average()
            runs.append((model, outer, local))
        first, second = (model.state_dict() for model, _, _ in runs)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert second["0.weight"].ne(network()[0].weight).any() and second["0.bias"].eq(network()[0].bias).all()
        model, outer, _ = runs[1]
        state, twin = copy.deepcopy(outer.state_dict()), copy.deepcopy(model)
        with Session(min_bytes=0, **kinds) as third:
            parts = [torch.optim.SGD(list(twin[0].named_parameters("0")), lr=1.0, momentum=0.9)]
            with pytest.raises(StateError, match="none of 1 local optimizers"):
                make(parts, third, **options).load_state_dict(state)
            parts.append(torch.optim.AdamW(list(twin[2].named_parameters("2")), lr=1.0))
            loaded = make(parts, third, **options)
            loaded.load_state_dict(state)
            third.load_state_dict(other.state_dict())
            assert [group["lr"] for group in loaded.param_groups] == pytest.approx([0.1, 0.01])
            for m, o in ((model, outer), (twin, loaded)):
                trained(m, o.step, 5, first=10)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
        outer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def test_diloco_takes_schedulers_of_momenta_and_states_of_plain_tensors(session, tmp_path):
    model = network()
    optimizer = adapter.DiLoCo(torch.optim.AdamW(model.named_parameters(), lr=0.1), session, every=2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    trained(model, lambda: [optimizer.step(), rate.step()], 4)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    optimizer.load_state_dict(state)
    rates = [group["lr"] for group in optimizer.param_groups]
    broken = copy.deepcopy(state)
    broken["diloco"]["steps"] = -1
    for wrong, error in [
        (broken, StateError),
        ({**state, "local": [{}]}, KeyError),
        ({**state, "diloco": 1}, StateError),
    ]:
        with pytest.raises(error):
            optimizer.load_state_dict(wrong)
    assert [group["lr"] for group in optimizer.param_groups] == rates and optimizer.state_dict()["diloco"]["steps"] == 4
    rate.step()
    assert optimizer._local[0].param_groups[0]["lr"] != rates[0]
    copied, twin = copy.deepcopy((optimizer, model))
    trained(twin, copied.step, 2)
    trained(model, optimizer.step, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))


def test_diloco_refuses_what_it_cannot_average(session):
    model = network()
    frozen = network()
    frozen[0].requires_grad_(False)
    outer = adapter.DiLoCo(torch.optim.SGD(frozen.named_parameters("frozen"), lr=0.1), session)
    with pytest.raises(ConfigError, match="make a new DiLoCo"):
        outer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    frozen[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="after parameters are thawed"):
        outer.step()
    with pytest.raises(ConfigError, match="expected an optimizer of torch"):
        adapter.DiLoCo(model.parameters(), session)
    twice = [torch.optim.SGD(m.named_parameters(), lr=0.1) for m in (model, network())]
    with pytest.raises(ConfigError, match=r"two parameters are named '0\.weight'"):
        adapter.DiLoCo(twice, session)


def test_clan_is_that_of_plain_arrays():
    model, twin = network(), network()
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": list(model[2].parameters())}]
    optimizer = adapter.Clan(groups, lr=0.01)
    cores = [
        optim.Clan({"w": twin[0].weight}, lr=0.01, weight_decay=0.1),
        optim.Clan(dict(twin[2].named_parameters()), lr=0.01),
    ]

    def plain():
        cores[0].step({"w": twin[0].weight.grad})
        cores[1].step({name: p.grad for name, p in twin[2].named_parameters()})

    trained(model, optimizer.step, 4)
    trained(twin, plain, 4)
    state = copy.deepcopy(optimizer.state_dict())
    other = adapter.Clan([{"params": group["params"]} for group in groups], lr=1.0)
    other.load_state_dict(state)
    trained(model, other.step, 3, first=4)
    trained(twin, plain, 3, first=4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    before = [p.clone() for p in model.parameters()]
    model[2].bias.grad[0] = torch.inf
    with pytest.raises(NonFiniteError):
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    with pytest.raises(StateError, match=r"got m of shape"):
        adapter.Clan(network(width=9).parameters()).load_state_dict(adapter_state(network()))
    with pytest.raises(ConfigError, match="Clan: betas"):
        adapter.Clan(model.parameters(), betas=(1.0, 0.9))


def adapter_state(model):
    optimizer = adapter.Clan(model.parameters())
    trained(model, optimizer.step, 1)
    return optimizer.state_dict()
