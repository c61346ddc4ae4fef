"""DiLoCo on one rank: the formula in float64, which fragment travels when, checkpoints, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi import Session
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError
from espresso_mpi.optim import DiLoCo
from espresso_mpi.optim.diloco import parts


@pytest.fixture
def session():
    with Session() as opened:
        yield opened


def start(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(size).astype(dtype) for name, size in [("a", 40), ("b", (8, 5)), ("c", 7)]}


def moves(count):
    rng = np.random.default_rng(1)
    shapes = {"a": 40, "b": (8, 5), "c": 7}
    return [{name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(count)]


def oracle(x, deltas, due, lr, momentum, nesterov, delay=0, mix=0.0):
    """One tensor in float64 on one rank, whose mean is its own progress; ``due``: steps in which it is sent."""
    x = x.astype(np.float64)
    anchor, u, under = x.copy(), np.zeros_like(x), {}
    for step, delta in enumerate(deltas, 1):
        x = x + delta
        if step in due:
            under[step + delay] = anchor - x
        if step in under:
            d = under.pop(step)
            u = momentum * u + d
            anchor = anchor - lr * (d + momentum * u if nesterov else u)
            x = mix * x + (1 - mix) * anchor
        yield x


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"every": 4}, {"a": [4, 8, 12], "b": [4, 8, 12], "c": [4, 8, 12]}),
        ({"every": 4, "nesterov": False, "lr": 0.3}, {"a": [4, 8, 12], "b": [4, 8, 12], "c": [4, 8, 12]}),
        ({"every": 6, "fragments": 2, "delay": 2}, {"a": [3, 9], "b": [6, 12], "c": [6, 12]}),
        ({"every": 6, "fragments": 3, "delay": 1, "mix": 0.25}, {"a": [2, 8], "b": [4, 10], "c": [6, 12]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, "torch"])
def test_agrees_with_the_formula(options, due, dtype, session):
    params, deltas = start(np.float32 if dtype == "torch" else dtype), moves(13)
    given, torch = params, None
    if dtype == "torch":
        torch = pytest.importorskip("torch")
        given = {name: torch.from_numpy(value.copy()) for name, value in params.items()}
    settings = {"lr": options.get("lr", 0.7), "momentum": 0.9, "nesterov": options.get("nesterov", True)}
    delay = options.get("delay", 0)
    mix = options.get("mix", 0.5 if delay else 0.0)
    expected = {
        name: list(oracle(params[name], [d[name] for d in deltas], due[name], **settings, delay=delay, mix=mix))
        for name in params
    }
    diloco = DiLoCo(given, session, momentum=0.9, **options)
    for step, delta in enumerate(deltas):
        for name in given:
            given[name] += torch.from_numpy(delta[name]).float() if torch is not None else delta[name].astype(dtype)
        diloco.step()
        for name in given:
            np.testing.assert_allclose(np.asarray(given[name]), expected[name][step], rtol=1e-4, atol=1e-4)


def test_parts_are_of_about_equal_size_and_none_is_empty():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = [(str(i), int(n)) for i, n in enumerate(rng.integers(1, 50, rng.integers(1, 20)))]
        for wanted in (1, 2, 3, 7):
            found = parts(sizes, wanted)
            assert [name for part in found for name in part] == [name for name, _ in sizes]
            assert len(found) == min(wanted, len(sizes)) and all(found)
            loads = [sum(dict(sizes)[name] for name in part) for part in found]
            assert max(loads) <= sum(loads) / len(found) + 2 * 50


def test_average_makes_the_parameters_the_anchor(session):
    params = start()
    diloco = DiLoCo(params, session, every=5, fragments=2, delay=1)
    for delta in moves(7):
        for name in params:
            params[name] += delta[name].astype(np.float32)
        diloco.step()
    diloco.average()
    for name, entry in diloco.state_dict()["tensors"].items():
        np.testing.assert_array_equal(params[name].reshape(-1), entry["anchor"])


def test_average_of_what_nobody_has_moved_changes_nothing(session):
    """The momentum is that of averages, so an average of no progress would move the parameters along it."""
    params = start()
    diloco = DiLoCo(params, session, every=4, fragments=2)
    for step, delta in enumerate(moves(8), 1):
        for name in params:
            params[name] += delta[name].astype(np.float32)
        diloco.step()
        if step == 4:
            diloco.average()  # of the first fragment; the second one has just been averaged
    moved = {name: value.copy() for name, value in params.items()}
    diloco.average()
    assert any((params[name] != moved[name]).any() for name in params)
    equal = {name: value.copy() for name, value in params.items()}
    for _ in range(3):
        diloco.average()
    assert all((params[name] == equal[name]).all() for name in params)


def test_an_average_that_fails_changes_no_fragment(session):
    params = start()
    diloco = DiLoCo(params, session, every=4, fragments=3)
    for value in params.values():
        value += 1
    good, before = params["c"].copy(), {name: value.copy() for name, value in params.items()}
    params["c"][0] = np.nan
    with pytest.raises(NonFiniteError, match="c"):
        diloco.average()
    state = diloco.state_dict()["tensors"]
    assert all((params[name] == before[name]).all() for name in ("a", "b"))
    assert all((state[name]["anchor"] == start()[name].reshape(-1)).all() for name in params)
    params["c"][...] = good
    diloco.average()
    for name, value in params.items():
        np.testing.assert_allclose(value, start()[name] + 0.7 * 1.6, rtol=1e-5)  # η (1 + μ) of the progress


def test_bad_input(session):
    params = start()
    for options, text in [
        ({"every": 0}, "every=0"),
        ({"every": 2, "fragments": 3}, "fragments=3"),
        ({"every": 6, "fragments": 2, "delay": 3}, "delay=3"),
        ({"lr": -1}, "lr=-1"),
        ({"momentum": 2}, "momentum=2"),
        ({"mix": 1.5}, "mix=1.5"),
    ]:
        with pytest.raises(ConfigError, match=f"DiLoCo: .*{text}"):
            DiLoCo(params, session, **options)
    diloco = DiLoCo(params, session, every=4, delay=1)
    with pytest.raises(GradientError, match=r"lacks 'b' and 1 more.*of before"):
        diloco.step({"a": params["a"]})
    with pytest.raises(GradientError, match=r"DiLoCo: b has .* elements; expected .*, as before"):  # not out of bounds
        diloco.step({**params, "b": np.tile(params["b"], (2, 1))})
    for _ in range(3):
        diloco.step()
    params["b"][0, 0] = np.nan
    state = diloco.state_dict()
    anchor = state["tensors"]["a"]["anchor"]
    diloco.step()
    with pytest.raises(ConfigError, match=r"on its way.*before state_dict"):
        diloco.state_dict()
    with pytest.raises(ConfigError, match=r"on its way.*before load_state_dict"):  # it would use the message later
        diloco.load_state_dict(state)
    with pytest.raises(NonFiniteError, match="b"):
        diloco.step()
    np.testing.assert_array_equal(diloco.state_dict()["tensors"]["a"]["anchor"], anchor)


def test_sparse_messages_need_feedback_that_is_named(session):
    with pytest.raises(ConfigError, match=r"DiLoCo.sparse: .*feedback='auto'.*decay=0.95"):
        DiLoCo.sparse(start(), session)
    with Session(compressor="topk_in_chunks", feedback="plain:decay=0.95") as opened:
        params, deltas = start(), moves(4)
        diloco = DiLoCo.sparse(params, opened, every=4, lr=1.0, fragments=2)
        for delta in deltas:
            for name in params:
                params[name] += delta[name].astype(np.float32)
            diloco.step()
        diloco.average()
    for name, x in start().items():
        expected = x + sum(delta[name] for delta in deltas)
        np.testing.assert_allclose(params[name], expected, rtol=1e-4, atol=1e-4)  # one rank, an outer rate of 1
