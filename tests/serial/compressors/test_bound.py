"""What only ``bound`` does: its payload, what it refuses, and how close its promise is."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.compressors import Context, get
from espresso_mpi.compressors.context import Journey
from espresso_mpi.errors import ConfigError


def wave(n):
    return (10 + np.sin(np.arange(n) / 50)).astype(np.float32)


def encode(method, x):
    payload = np.full(method.nbytes(x.size), 0xA5, np.uint8)
    method.encode(x, payload)
    return payload


@pytest.mark.parametrize("bits", [4, 7, 8, 13, 16])
@pytest.mark.parametrize("n", [1, 64, 200])
def test_payload_is_the_documented_one(bits, n):
    x, top = wave(n), 2 ** (bits - 1) - 1
    payload = encode(get(f"bound:bits={bits}"), x)
    words = payload.view(np.uint32)
    step = words[:1].view(np.float32)[0].astype(np.float64)
    assert not words[1:4].any()
    if n > 1:
        assert step == pytest.approx(np.abs(np.diff(x.astype(np.float64))).max() / (top - 2), rel=1e-6)
    for number, block in enumerate(words[4:].reshape(-1, 1 + 2 * bits)):
        values = x[64 * number : 64 * number + 64].astype(np.float64)
        codes = np.unpackbits(block[1:].view(np.uint8), bitorder="little").reshape(64, bits) @ (1 << np.arange(bits))
        assert block[:1].view(np.float32)[0] == values[0] and not codes[values.size :].any()
        seen = values[0] + step * np.cumsum(codes[: values.size] - top)
        assert np.abs(seen - values).max() <= step * 0.51
        assert codes.max() <= 2 * top


def test_the_bits_that_a_refusal_names_are_the_fewest():
    x, journey = wave(3000), Journey(encodes=2, ranks=4)
    text = get("bound:abs=1e-4,bits=4").refusal(x, journey, Context())
    bits = int(text.rpartition("bits=")[0].rpartition("bits=")[2].split()[0])
    assert "rel" not in text and 4 < bits < 16
    assert not get(f"bound:abs=1e-4,bits={bits}").refusal(x, journey, Context())
    assert get(f"bound:abs=1e-4,bits={bits - 1}").refusal(x, journey, Context())


def test_what_asks_for_more():
    """More encodes, ranks, uneven nodes, sums and narrow types can only add to the error."""
    method, least = get("bound"), get("bound").largest_error(0.1, 10, Journey())
    for journey in (
        Journey(encodes=2),
        Journey(ranks=100),
        Journey(excess=1.5),
        Journey(ranks=2, total=True),
        Journey(dtype="float16"),
    ):
        assert method.largest_error(0.1, 10, journey) > least


def test_what_float32_cannot_hold_is_refused():
    x = wave(3000) * np.float32(1e6)
    text = get("bound:abs=1e-3,bits=16").refusal(x, Journey(2, 4), Context())
    assert "expected a larger bound (with bits=16" in text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_what_is_not_finite(value):
    x = wave(100)
    x[50] = value
    assert get("bound").refusal(x, Journey(), Context()) == "NaN or infinite values"


@pytest.mark.parametrize("encodes", [1, 2, 3, 4])
def test_the_default_takes_any_values(encodes):
    x = np.resize(np.float32([1, -1]), 1000)  # neighbours as different as can be
    assert not get("bound").refusal(x, Journey(encodes, 64), Context())


def test_zeros_are_within_any_bound():
    assert not get("bound:rel=1e-6").refusal(np.zeros(100, np.float32), Journey(), Context())


def test_a_schedule_is_kept_at_every_step():
    x, journey = wave(3000), Journey(encodes=2, ranks=4)
    assert not get("bound:abs=1e-2,bits=8").refusal(x, journey, Context())
    assert get("bound:abs=1e-2~1e-6@10,bits=8").refusal(x, journey, Context())


@pytest.mark.parametrize("spec", ["bits=3", "bits=17", "abs=-1", "rel=0", "rel=2", "abs=inf"])
def test_refuses_parameters_that_do_not_fit(spec):
    with pytest.raises(ConfigError):
        get(f"bound:{spec}")
