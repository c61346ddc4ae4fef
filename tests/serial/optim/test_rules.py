"""Optimizers that synchronise by themselves, on one rank: the formulas in float64, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from optim_oracles import CASES, Exchanges, difference

from espresso_mpi import Session, optim
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError, StateError
from espresso_mpi.optim.tensors import NumPy, Torch

SHAPES = {"w": (96, 64), "b": (7,)}


@pytest.fixture
def session():
    with Session(compressor="onebit", min_bytes=0) as opened:
        yield opened


def start(dtype=np.float32):
    rng = np.random.default_rng(99)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(step, dtype=np.float32):
    """Some elements have none in the first ten steps, which are at least the warm-up of each case."""
    rng = np.random.default_rng(step)
    found = {name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in SHAPES.items()}
    if step < 10:
        for array in found.values():
            array[..., ::5] = 0
    return found


def made(case, params, session):
    return getattr(optim, case.split()[0])(params, session, **CASES[case][1])


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "torch", "float16 gradients", "expressions", "expressions of torch"]
)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_paper(case, kind, session, monkeypatch):
    """Expressions are what GPUs compute, which have no kernel here."""
    if kind.startswith("expressions"):
        for library in (NumPy, Torch):
            monkeypatch.setattr(library, "host_view", lambda self, array: None)
    exchanges = Exchanges(session, monkeypatch)
    params = start(np.float64 if kind == "float64" else np.float32)
    grads = lambda step: gradients(step, np.float16 if kind == "float16 gradients" else np.float32)  # noqa: E731
    if kind.endswith("torch"):
        torch = pytest.importorskip("torch")
        params = {name: torch.from_numpy(array) for name, array in params.items()}
        grads = lambda step: {name: torch.from_numpy(g) for name, g in gradients(step).items()}  # noqa: E731
    assert difference(made(case, params, session), params, grads, case, exchanges) < 2e-5


def test_momentum_is_torchs_sgd(session):
    torch = pytest.importorskip("torch")
    ours, theirs = start(), {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in start().items()}
    options = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}
    sgd, reference = optim.MomentumSGD(ours, session, **options), torch.optim.SGD(theirs.values(), **options)
    for step in range(6):
        sgd.step(gradients(step))
        for name, g in gradients(step).items():
            theirs[name].grad = torch.from_numpy(g)
        reference.step()
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name].detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_bad_gradient_changes_nothing_and_none_counts_as_zero(case, steps, session):
    params, twin = start(), start()
    optimizer, other = made(case, params, session), made(case, {"t": twin}, session)
    for step in range(steps):
        optimizer.step({**gradients(step), "b": None})
        other.step({"t": {**gradients(step), "b": np.zeros(7, np.float32)}})
    before, state, bad = {n: p.copy() for n, p in params.items()}, optimizer.state_dict(), gradients(50)
    bad["w"][3, 4] = np.inf
    with pytest.raises(NonFiniteError, match="w"):
        optimizer.step(bad)
    for name in SHAPES:
        np.testing.assert_array_equal(params[name], before[name])
        np.testing.assert_array_equal(params[name], twin[name])
    after = optimizer.state_dict()
    assert after["rule"] == state["rule"]
    assert all(np.array_equal(after["moments"]["w"][key], value) for key, value in state["moments"]["w"].items())


def test_a_bad_gradient_of_a_local_step_is_the_error_of_the_next_synchronisation(session):
    params = start()
    adam = optim.ZeroOneAdam(params, session, warmup=2, double_every=1, longest=4)
    for step in range(3):
        adam.step(gradients(step))
    bad = gradients(3)
    bad["b"][0] = np.nan
    adam.step(bad)  # local
    assert all(np.isfinite(array).all() for array in params.values())
    with pytest.raises(ConfigError, match=r"average\(\) before state_dict"):
        adam.state_dict()
    with pytest.raises(NonFiniteError):
        adam.average()
    adam.average()
    state = adam.state_dict()
    assert state["rule"]["synced_at"] == 4
    state["rule"]["synced_at"] = 3
    with pytest.raises(StateError, match="after 4 steps, synchronised after 3"):
        adam.load_state_dict(state)
    assert all(np.isfinite(array).all() for array in params.values())


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("MomentumSGD", {"momentum": 1}, "momentum=1"),
        ("MomentumSGD", {"nesterov": 1}, "nesterov=1"),
        ("MomentumSGD", {"lr": -1}, "lr=-1"),
        ("MomentumSGD", {"warmup": -1}, "warmup=-1"),
        ("OnebitLamb", {"warmup": 0}, "warmup=0"),
        ("OnebitLamb", {"coefficients": (2, 1)}, "coefficients="),
        ("OnebitLamb", {"coefficients": 1}, "coefficients="),
        ("DeMo", {"sign": 1}, "sign=1"),
        ("DeMo", {"lr": True}, "lr=True"),
        ("DeMo", {"weight_decay": -1}, "weight_decay=-1"),
        ("ZeroOneAdam", {"warmup": 0}, "warmup=0"),
        ("ZeroOneAdam", {"kappa": 0.5}, "kappa=0.5"),
        ("ZeroOneAdam", {"double_every": 0}, "double_every=0"),
        ("ZeroOneAdam", {"longest": True}, "longest=True"),
        ("ZeroOneAdam", {"betas": (0.9, 1.0)}, "betas="),
        ("ZeroOneAdam", {"update_clip": "1"}, "update_clip='1'"),
    ],
    ids=str,
)
def test_bad_numbers(name, options, text, session):
    with pytest.raises(ConfigError, match=f"{name}: {text}"):
        getattr(optim, name)(start(), session, **options)


def test_a_warm_up_sends_dense_what_the_session_sends_dense(monkeypatch):
    with Session(compressor="onebit", dense=["*head*"], min_bytes=100) as opened:
        sent, allreduce = {}, opened.allreduce

        def watched(x, **options):
            sent[options["name"].split()[-1]] = options["compressor"]
            return allreduce(x, **options)

        monkeypatch.setattr(opened, "allreduce", watched)
        params = {"w": np.ones(40, np.float32), "head": np.ones(40, np.float32), "small": np.ones(3, np.float32)}
        optim.OnebitAdam(params, opened, warmup_compressor="int8").step(params)
    assert sent == {"w": "int8", "head": "none", "small": "none"}


def test_lamb_loads_coefficients_of_its_own_parameters(session):
    lamb = optim.OnebitLamb(start(), session, warmup=1)
    lamb.step(gradients(20))
    state = lamb.state_dict()
    state["rule"]["coefficients"] = {"other": (1.0, 1.0)}
    with pytest.raises(StateError, match="coefficients of 'other' and others, but none of 'b'"):
        lamb.load_state_dict(state)


def test_parameters_of_another_size_are_refused(session):
    """Kernels would go beyond the arrays of before."""
    params = start()
    adam = optim.OnebitAdam(params, session)
    params["w"] = np.tile(params["w"], (2, 1))
    with pytest.raises(GradientError, match=r"OnebitAdam: w has .* elements; expected .*, as before"):
        adam.step({name: np.ones_like(array) for name, array in params.items()})


@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam", "MomentumSGD", "DiLoCo"])
def test_empty_parameters_stay(name, session):
    params = {"w": np.ones(9, np.float32), "none": None, "empty": np.ones((0, 4), np.float32), "one": np.ones(())}
    grads = {key: None if array is None else np.ones_like(array) for key, array in params.items()}
    optimizer = getattr(optim, name)(params, session, **({"every": 1} if name == "DiLoCo" else {"lr": 0.1}))
    params["w"] -= 0.5  # DiLoCo has local steps
    for _ in range(3):
        found = optimizer.step() if name == "DiLoCo" else optimizer.step(grads)
    assert found["none"] is None and found["empty"].shape == (0, 4) and found["w"].max() < 0.9
    optimizer.load_state_dict(optimizer.state_dict())


def test_momenta_outlive_local_steps_at_a_rate_of_zero(session):
    adam = optim.ZeroOneAdam(start(), session, warmup=2, double_every=1, longest=2)
    for step in range(12):
        adam.lr = 0.0 if step > 6 else 0.01
        adam.step(gradients(20))
    adam.average()
    m = adam.state_dict()["moments"]["w"]["m"]
    np.testing.assert_allclose(m, gradients(20)["w"].ravel() * (1 - 0.9**12), rtol=0.05)


@pytest.mark.parametrize("feedback", ["none", "ef21"])
def test_demo_needs_residuals_for_its_momenta(feedback):
    with (
        Session(compressor="dct_topk", feedback=feedback) as opened,
        pytest.raises(ConfigError, match=f"DeMo: .*feedback='{feedback}'.*decay=0.999"),
    ):
        optim.DeMo(start(), opened)


def test_demo_warns_of_a_session_that_may_leave_no_momentum(caplog):
    for feedback, warnings in [("plain:decay=0.999", 0), ("auto", 1)]:
        with Session(compressor="dct_topk", feedback=feedback) as opened:
            optim.DeMo(start(), opened)
        assert caplog.text.count("leave no momentum") == warnings
