"""CLAN against its formula in float64, on all kinds of arrays, through checkpoints, and on a problem to be solved."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.arrays import buffers
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError
from espresso_mpi.optim import Clan, tensors
from espresso_mpi.optim import clan as clan_module

BETAS, EPS, DECAY = (0.9, 0.999), 1e-6, 0.01


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def oracle(x, gradients, lrs, betas=BETAS, eps=EPS, decay=DECAY):
    """The formula as it is printed, in float64, for one tensor; returns x after every step."""
    x, found = x.astype(np.float64), []
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (gradient, lr) in enumerate(zip(gradients, lrs), 1):
        g = gradient / (np.linalg.norm(gradient) + eps)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        root = np.sqrt(v / (1 - betas[1] ** t)) + eps
        r, u = m / (1 - betas[0] ** t) / root + decay * x, g / root + decay * x
        x = x - lr * (betas[0] * trusted(x, r) + (1 - betas[0]) * trusted(x, u))
        found.append(x)
    return found


def trusted(x, direction):
    """The direction with the length of x, unless one of them has none."""
    lengths = np.linalg.norm(x), np.linalg.norm(direction)
    return direction * (lengths[0] / lengths[1] if min(lengths) > 0 else 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"betas": (0.0, 0.5)}, {"eps": 1e-2}, {"decay": 0.0}, {"decay": 0.3}],
    ids=str,
)
def test_agrees_with_the_formula(options, dtype):
    x = gaussian((7, 5)).astype(dtype)
    gradients, lrs = [gaussian((7, 5), 1 + t) for t in range(12)], [0.02 / (1 + t) for t in range(12)]
    params = {"w": x.copy()}
    named = {("weight_decay" if key == "decay" else key): value for key, value in options.items()}
    clan = Clan(params, lr=99, **named)
    for gradient, lr, expected in zip(gradients, lrs, oracle(x, gradients, lrs, **options)):
        clan.lr = lr
        clan.step({"w": gradient.astype(np.float32)})
        np.testing.assert_allclose(params["w"], expected, rtol=2e-5, atol=2e-6)


def test_the_first_step_by_hand():
    """At the start m̂/√v̂ is the sign; so without decay each element moves by η times the mean square of x, rooted."""
    x, g = np.array([3, -4, 12, 84], np.float32), np.array([5, -1, 2, -7], np.float32)
    params = [x.copy()]
    Clan(params, lr=0.1, eps=1e-12, weight_decay=0).step([g])
    np.testing.assert_allclose(params[0], x - 0.1 * np.sign(g) * 85 / 2, rtol=1e-6)


def test_the_length_of_the_gradient_makes_no_difference():
    found = []
    for scale in (1e-3, 1, 2.0**100):
        params = [gaussian(50).astype(np.float32)]
        clan = Clan(params, lr=0.1, eps=1e-12)
        for step in range(3):
            clan.step([(gaussian(50, step) * scale).astype(np.float32)])
        found.append(params[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "g", "expected"),
    [
        ([0, 0], [1, -1], [-0.1, 0.1]),  # no length to take a share of: plain steps of η
        ([1, 2], [0, 0], [0.9, 1.8]),  # the decay alone, at the ratio of its norms: a step of η‖x‖ against x
        ([0, 0], [0, 0], [0, 0]),
    ],
)
def test_where_a_norm_is_zero(x, g, expected):
    params = [np.array(x, np.float32)]
    Clan(params, lr=0.1).step([np.array(g, np.float32)])
    np.testing.assert_allclose(params[0], expected, rtol=1e-4)


# --- containers and arrays --------------------------------------------------------------------------------------------


def test_nested_containers_are_updated_in_place():
    arrays = [gaussian(shape).astype(np.float32) for shape in [(3, 4), (5,), (), (0,)]]
    before = [array.copy() for array in arrays]
    params = {"a": [arrays[0], (arrays[1], None)], "b": {"c": arrays[2], "d": arrays[3]}}
    clan = Clan(params, lr=0.1)
    ones = [np.ones_like(array) for array in arrays]
    assert clan.step({"b": {"d": ones[3], "c": ones[2]}, "a": [ones[0], (ones[1], None)]}) is params
    for array, old in zip(arrays, before):
        assert array.shape == old.shape and (array != old).all()
        alone = [old]
        Clan(alone, lr=0.1).step([np.ones_like(old)])
        assert np.array_equal(alone[0], array), "tensors influence one another"


def test_a_missing_gradient_leaves_its_tensor_alone():
    params, alone = {"a": gaussian(5), "b": gaussian(5)}, {"a": gaussian(5)}
    clan, other = Clan(params), Clan(alone)
    for step in range(4):
        g = gaussian(5, step)
        clan.step({"a": None if step % 2 else g, "b": g})
        if not step % 2:
            other.step({"a": g})
    assert np.array_equal(params["a"], alone["a"]), "a step without a gradient counted"
    assert clan.state_dict()["a"]["steps"] == 2


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_gradients_of_other_types(dtype):
    g = gaussian(20).astype(dtype)
    one, other = [gaussian(20)], [gaussian(20)]
    Clan(one).step([g])
    Clan(other).step([g.astype(np.float32)])
    np.testing.assert_allclose(one[0], other[0], rtol=1e-7)


def test_bfloat16_gradients():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    g = gaussian(20).astype(ml_dtypes.bfloat16)
    one, other = [gaussian(20)], [gaussian(20)]
    Clan(one).step([g])
    Clan(other).step([g.astype(np.float32)])
    assert np.array_equal(one[0], other[0])


def test_gradients_are_not_changed():
    params, g = [gaussian(20)], gaussian(20)
    Clan(params).step([g])
    assert np.array_equal(g, gaussian(20))


def test_torch_tensors_give_what_numpy_gives():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(6, 4)
    params = dict(layer.named_parameters())
    same = {name: p.detach().numpy().copy() for name, p in params.items()}
    clan, other = Clan(params, lr=0.05), Clan(same, lr=0.05)
    for step in range(5):
        layer.zero_grad()
        layer(torch.from_numpy(gaussian((8, 6), step).astype(np.float32))).square().sum().backward()
        assert clan.step({name: p.grad for name, p in params.items()}) is params
        other.step({name: p.grad.numpy() for name, p in params.items()})
        for name, p in params.items():
            assert p.requires_grad and p.grad_fn is None
            np.testing.assert_allclose(p.detach().numpy(), same[name], rtol=1e-6, atol=1e-7)
    clan.load_state_dict(other.state_dict())
    np.testing.assert_allclose(clan.state_dict()["weight"]["v"], other.state_dict()["weight"]["v"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_torch_parameters_take_other_gradients(dtype):
    torch = pytest.importorskip("torch")
    g = torch.from_numpy(gaussian(20)).to(getattr(torch, dtype))
    params, same = [torch.from_numpy(gaussian(20))], [gaussian(20)]
    Clan(params).step([g])
    Clan(same).step([g.float().numpy()])
    np.testing.assert_allclose(params[0].numpy(), same[0], rtol=1e-6)
    Clan(params).step([gaussian(20)])  # of numpy


def test_jax_arrays_come_back_as_new_ones():
    jax = pytest.importorskip("jax")
    params, same = {"w": jax.numpy.ones(5)}, {"w": np.ones(5, np.float32)}
    clan, other = Clan(params), Clan(same)
    for step in range(3):
        g = gaussian(5, step).astype(np.float32)
        params = clan.step({"w": jax.numpy.asarray(g)})
        other.step({"w": g})
        assert np.array_equal(np.asarray(params["w"]), same["w"])


# --- GPU arrays, played by host memory: a library that has CuPy's functions -------------------------------------------


def on_a_gpu(monkeypatch):
    """``buffers.adopt`` says of every numpy array that it is on a GPU."""
    real = buffers.adopt

    def adopt(name, value):
        found = real(name, value)
        spec = type(found.spec)(name, found.spec.shape, found.spec.dtype, "gpu")
        return buffers.Gradient(spec, found.array)

    monkeypatch.setattr(buffers, "adopt", adopt)


def test_gpu_arrays_without_cupy_are_refused(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GradientError, match=r"0: got a GPU array.*import cupy"):
        Clan([gaussian(3)])


def test_gpu_arrays_are_computed_with_by_cupy(monkeypatch):
    on_a_gpu(monkeypatch)
    calls = []

    class CuPy(SimpleNamespace):
        def __getattr__(self, name):
            calls.append(name)
            return np.array if name == "asnumpy" else getattr(np, name)

    monkeypatch.setitem(sys.modules, "cupy", CuPy())
    params = [gaussian(20)]
    clan = Clan(params)
    for step in range(2):
        clan.step([gaussian(20, step).astype(np.float16)])
    clan.load_state_dict(clan.state_dict())
    monkeypatch.undo()
    same = [gaussian(20)]
    other = Clan(same)
    for step in range(2):
        other.step([gaussian(20, step).astype(np.float16)])
    assert np.array_equal(params[0], same[0])
    assert set(calls) == {"asarray", "zeros", "asnumpy"}


def test_a_gpu_gradient_of_a_host_parameter_is_refused(monkeypatch):
    clan = Clan([gaussian(3)])
    known = tensors.tensors_of(clan._params)
    monkeypatch.setattr(clan_module, "tensors_of", lambda params: known)
    on_a_gpu(monkeypatch)
    with pytest.raises(GradientError, match=r"0: got a gradient on the GPU.*move one"):
        clan.step([gaussian(3)])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"a": np.ones(3)}, "lacks 'b'"),
        ({"a": np.ones(3), "b": np.ones(2), "c": np.ones(2)}, "has 'c'"),
        ({"a": np.ones(3), "b": np.ones((2, 1))}, r"b: got a gradient of shape \(2, 1\); expected shape \(2,\)"),
        ({"a": np.ones(3), "b": 1.0}, "b: got a gradient of shape float"),
        ({"a": np.ones(3), "b": np.ones(2, np.int32)}, "b: got elements of type int32"),
        ({"a": np.ones(3), "b": np.array([1, np.nan])}, "b: the gradient holds"),
        ({"a": np.ones(3), "b": np.array([1, -np.inf], np.float32)}, "b: the gradient holds"),
    ],
)
def test_a_gradient_that_does_not_fit_changes_nothing(grads, message):
    params = {"a": gaussian(3), "b": gaussian(2)}
    clan = Clan(params)
    with pytest.raises((GradientError, NonFiniteError), match=message):
        clan.step(grads)
    assert np.array_equal(params["a"], gaussian(3)) and np.array_equal(params["b"], gaussian(2))
    assert all(entry["steps"] == 0 and not entry["m"].any() for entry in clan.state_dict().values())


def test_the_largest_float32_gradients_are_finite():
    params = [np.ones(1000, np.float32)]
    Clan(params).step([np.full(1000, 3e38, np.float32)])
    assert np.isfinite(params[0]).all() and (params[0] < 1).all()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"lr": float("nan")},
        {"betas": (1, 0.9)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9,)},
        {"eps": 0},
        {"weight_decay": -1e-9},
        {"weight_decay": float("inf")},
    ],
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Clan([gaussian(3)], **options)


def test_a_bad_learning_rate_is_refused_later_too():
    clan = Clan([gaussian(3)])
    with pytest.raises(ConfigError, match="lr=-1"):
        clan.lr = -1
    assert clan.lr == 1e-3


def test_parameters_that_cannot_be_updated_are_refused():
    with pytest.raises(GradientError, match=r"w: got a parameter of type float16.*float32 copy"):
        Clan({"w": np.ones(3, np.float16)})
    with pytest.raises(GradientError, match=r"w: got a read-only"):
        Clan({"w": np.broadcast_to(1.0, (3, 3))})


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_strided_parameters_are_updated_in_place(library):
    tools = pytest.importorskip(library)
    value = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    turned, straight = (tools.asarray(v) for v in (value.T.copy().T, value.copy()))
    for params in ({"w": turned}, {"w": straight}):
        clan = Clan(params, lr=0.1)
        for seed in range(2):
            clan.step({"w": tools.asarray(np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32))})
    assert np.array_equal(np.asarray(turned), np.asarray(straight)) and not np.array_equal(straight, value)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signs_only", [False, True])
def test_solves_a_regression(signs_only):
    """Also with the signs of the gradient only, which is what compressed gradients look like."""
    A, truth = gaussian((200, 10)), gaussian(10, 1)
    params = {"w": np.full(10, 0.1, np.float32)}
    clan = Clan(params, weight_decay=0)
    for step in range(600):
        clan.lr = 0.1 * (1 - step / 600)
        g = A.T @ (A @ (params["w"] - truth)) / 200
        clan.step({"w": np.sign(g) if signs_only else g})
    assert np.linalg.norm(params["w"] - truth) < 0.02 * np.linalg.norm(truth)


# --- imports ----------------------------------------------------------------------------------------------------------


def test_needs_no_mpi():
    code = (
        "import sys, numpy, espresso_mpi\n"
        "x = [numpy.ones(3)]\n"
        "espresso_mpi.optim.Clan(x).step([numpy.ones(3)])\n"
        "heavy = {'mpi4py', 'numba', 'torch', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
