"""The laws that every compressor obeys, one plain function each, over any ``Compressor``: see ``LAWS``.

They know the contract of ``espresso_mpi.compressors.base`` and nothing of the methods. A law takes a compressor and
raises an AssertionError that says at which size, on which input and by how much it is broken. ``test_laws.py`` runs
the whole table over every registered name and its class's ``examples``.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numba
import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from law_tools import (
    INPUTS,
    KEY,
    SHARED,
    SMOOTH,
    SPECIAL_WORDS,
    TAME,
    WILD,
    Watch,
    Watched,
    bounds,
    case,
    compress,
    decode,
    encode,
    error,
    gaussian,
    one_hot,
    randomness,
    same_bits,
    sanitised,
    seeds,
    square,
)

from espresso_mpi.compressors import Compressor, Context, ParameterSchedule, get
from espresso_mpi.compressors.context import Journey
from espresso_mpi.compressors.kernels.cpu.host import PARALLEL_MIN
from espresso_mpi.errors import ConfigError, PayloadError

SIZES = (0, 1, 7, 31, 33, 63, 64, 65)
EDGES = (2047, 2049, 8191, 8193, 65535, 65537)
"""Sizes around the usual blocks, and around where kernels begin to use threads."""
LARGE = 400_009
"""Several chunks of every kernel, and a part of one; above PARALLEL_MIN on four threads."""
EPS = float(np.finfo(np.float32).eps)
QUANTUM = float(np.finfo(np.float32).smallest_subnormal)
TINY = 1e-30
"""Methods may send a block whose magnitudes are all below this as zeros: its scale would underflow."""
SIGMAS = 5.0
"""How far, in standard deviations, a statistic may lie from its expectation: once in two million by chance."""
RANKS = 3

Law = Callable[[Compressor], None]


# --- names, sizes, parameters -----------------------------------------------------------------------------------------


def spec_reads_back(c: Compressor) -> None:
    """``get(str(c)) == c``, and the examples of its class are other specs of it."""
    assert get(str(c)) == c, f"{str(c)!r} reads back as {get(str(c))!r}"
    for spec in type(c).examples:
        assert get(spec).name == c.name, f"{spec!r} is a spec of {c.name}"


def metadata_is_consistent(c: Compressor) -> None:
    """What a method says of itself agrees with itself, at every size."""
    assert c.nbytes(0) == 0, f"nbytes(0) = {c.nbytes(0)}, but nothing is written for no elements"
    for n in (*SIZES[1:], 1000, 1 << 20):
        with case(f"n = {n}"):
            _sizes_are_consistent(c, n)
            _promises_are_consistent(c, n)


def _sizes_are_consistent(c: Compressor, n: int) -> None:
    total, header = c.nbytes(n), c.header(n)
    assert type(total) is int and total > 0, f"nbytes is {total!r}"
    assert type(header) is int and header % 16 == 0 and 0 <= header <= total, f"header is {header!r} of {total}"
    if c.element is not None:
        width = _WIDTHS[c.element]
        assert (total - header) % width == 0, f"{total - header} bytes do not hold elements of {width}"
    wanted = c.summary(n)
    assert wanted is None or (wanted.size > 0 and wanted.operator in ("sum", "max")), f"summary is {wanted}"
    assert c.encode_traffic(n) >= 4 * n + total, "encode_traffic is less than x and the payload"
    assert c.decode_traffic(n) >= total, "decode_traffic is less than the payload"


def _promises_are_consistent(c: Compressor, n: int) -> None:
    delta, omega, normal = c.contraction(n), c.variance(n), c.gaussian_error(n)
    assert 0 <= delta <= 1, f"contraction is {delta}"
    assert omega is None or omega >= 0, f"variance is {omega}"
    assert normal is None or normal >= 0, f"gaussian_error is {normal}"
    if omega is not None:
        assert delta >= (1 - omega) * (1 - 1e-9), f"variance {omega} means a contraction of {1 - omega}, not {delta}"
    for name, bound in bounds(c, n).items():
        assert normal is None or normal <= bound * 1.0001 + 1e-12, f"gaussian_error {normal} exceeds {name} {bound}"


_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4}


def schedules_settle(c: Compressor) -> None:
    """Every number among the parameters may be a schedule: ``at`` settles it, and ``nbytes`` follows."""
    for f in fields(c):
        value = getattr(c, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            continue
        for end in (value, *_others(c, f.name, value)):
            with case(f"{f.name} = {ParameterSchedule(value, end, 8)}"):
                _schedule_settles(c, f.name, value, end)


def _others(c: Compressor, name: str, value: Any) -> Iterator[Any]:
    """Another value that the parameter may take, if one is easily found."""
    for other in (value * 2, value / 2 if isinstance(value, float) else value // 2):
        with suppress(ConfigError):
            replace(c, **{name: other})
            yield other
            return


def _schedule_settles(c: Compressor, name: str, start: Any, end: Any) -> None:
    scheduled = replace(c, **{name: ParameterSchedule(start, end, 8)})
    assert get(str(scheduled)) == scheduled, f"{str(scheduled)!r} reads back as {get(str(scheduled))!r}"
    last = replace(c, **{name: end})
    assert scheduled.at(None) == last and scheduled.at(8) == last, f"at(8) is {scheduled.at(8)}, not {last}"
    assert scheduled.at(None).nbytes(1000) == last.nbytes(1000)
    assert scheduled.at(0) == c, f"at(0) is {scheduled.at(0)}, not {c}"


def refuses_arrays_that_do_not_fit(c: Compressor) -> None:
    """Wrong sizes, types, dimensions and strides raise PayloadError; nothing is read or written."""
    x, payload = gaussian(100), np.zeros(c.nbytes(100), np.uint8)
    wrong = {
        "a short payload": (x, payload[:-1]),
        "a long payload": (x, np.append(payload, payload[:1])),
        "an int8 payload": (x, payload.view(np.int8)),
        "a strided payload": (x, np.repeat(payload, 2)[::2]),
        "float64 values": (x.astype(np.float64), payload),
        "values in two dimensions": (x.reshape(10, 10), payload),
        "strided values": (np.repeat(x, 2)[::2], payload),
    }
    for what, (values, target) in wrong.items():
        for call in (c.encode, lambda v, p: c.decode(p, v), lambda v, p: c.decode_add(p, v)):
            _refused(what, call, values, target)
    for what, residual in {
        "a short residual": np.zeros(99, np.float32),
        "a float64 residual": np.zeros(100),
        "a strided residual": np.zeros(200, np.float32)[::2],
    }.items():
        _refused(what, c.encode, x, payload, residual)


def _refused(what: str, call: Any, *args: Any) -> None:
    said = "nothing"
    try:
        call(*args)
    except PayloadError as refusal:
        said = str(refusal)
    except Exception as other:
        said = f"{type(other).__name__}: {other}"
    assert "expected" in said, f"{what} must be refused, saying what is expected; it said {said}"


# --- memory -----------------------------------------------------------------------------------------------------------


def writes_its_arrays_and_nothing_else(c: Compressor) -> None:
    """Every byte of the payload and no byte beside any array is written; x stays as it is; all at all sizes."""
    for n in (*SIZES, *EDGES, LARGE):
        with case(f"n = {n}"):
            watch, x, before = Watch(), gaussian(n), gaussian(n, 1)
            first, residual = _watched_encode(c, watch, x, before, 0x00)
            second, _ = _watched_encode(c, watch, x, before, 0xFF)
            assert same_bits(first, second), "the payload depends on what its memory held: a byte is not written"
            _conserves(c, sanitised(x, before), _watched_decodes(c, watch, first, before), residual)
            watch.check()


def _watched_encode(
    c: Compressor, watch: Watch, x: np.ndarray, before: np.ndarray, fill: int
) -> tuple[np.ndarray, np.ndarray]:
    """Payload and residual of one encode in guarded memory."""
    source, residual = watch.floats("x", x), watch.floats("residual", before)
    payload = watch.empty("payload", c.nbytes(x.size), np.uint8, 16, fill)
    context = Watched(KEY, SHARED, watch=watch)
    wanted = c.summary(x.size) if x.size else None
    if wanted is not None:
        summary = watch.empty("summary", wanted.size, np.float32, 4, fill)
        c.summarise(source, summary, residual, context)
        context = replace(context, summary=summary)
    c.encode(source, payload, residual, context)
    assert same_bits(source, x), "x was changed"
    c.update_from_aggregate(payload, x.size, context)
    return payload, residual


def _watched_decodes(c: Compressor, watch: Watch, payload: np.ndarray, before: np.ndarray) -> np.ndarray:
    """What the payload decodes to, and that decode_add adds the same."""
    n, bytes_before = before.size, payload.tobytes()
    seen, out = watch.empty("out", n, np.float32, 4), watch.floats("out of decode_add", before)
    c.decode(payload, seen, Watched(~KEY, SHARED, watch=watch))
    c.decode_add(payload, out, Watched(~KEY, SHARED, watch=watch))
    assert payload.tobytes() == bytes_before, "decoding changed the payload"
    _added(before, seen, out)
    return seen


def _added(before: np.ndarray, seen: np.ndarray, out: np.ndarray) -> None:
    assert np.isfinite(seen).all(), "decoded values are not finite"
    slack = EPS * (np.abs(before) + np.abs(seen)) + QUANTUM
    off = np.abs(out - (before.astype(np.float64) + seen)) > slack
    assert not off.any(), f"decode_add is not decode and add, first at [{np.argmax(off)}]"


def decode_add_adds(c: Compressor) -> None:
    """``decode_add`` gives ``out + decode`` within a rounding, on all kinds of input."""
    for n in (1, 65, 1000):
        for kind, make in TAME.items():
            with case(f"n = {n}", kind):
                x, before = make(n), make(n)[::-1] * np.float32(0.25)
                payload, out = encode(c, x), before.copy()
                c.decode_add(payload, out, Context(~KEY, SHARED))
                _added(before, decode(c, payload, n), out)


def allocates_nothing_in_the_steady_state(c: Compressor) -> None:
    """With a context that persists, a step takes its memory from the workspace."""
    n, context = 1 << 18, Context(KEY, SHARED)
    x, residual, out = gaussian(n), np.zeros(n, np.float32), np.zeros(n, np.float32)
    payload = np.empty(c.nbytes(n), np.uint8)
    calls = (lambda: c.encode(x, payload, residual, context), lambda: c.decode_add(payload, out, context))
    for _ in range(3):
        for call in calls:
            call()
    for what, call in zip(("encode", "decode_add"), calls):
        peak = _peak(call)
        assert peak < 1 << 16, f"{what} of {n} elements allocates {peak} bytes"


def _peak(call: Callable[[], None]) -> int:
    """The most memory that a call holds at a time."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# --- nothing is lost --------------------------------------------------------------------------------------------------


def _conserves(c: Compressor, v: np.ndarray, seen: np.ndarray, residual: np.ndarray) -> None:
    """``seen + residual = v``: exactly for sparse methods, to a unit in the last place of the larger for others."""
    assert np.isfinite(seen).all(), "decoded values are not finite"
    assert np.isfinite(residual).all(), "the residual is not finite"
    if c.sparse and c.variance(max(1, v.size)) is None:
        wrong = ~(((seen == v) & (residual == 0)) | ((seen == 0) & (residual == v)))
        unit: Any = "sparse methods send a value exactly or not at all"
    else:
        unit = np.spacing(np.maximum(np.abs(v), np.abs(seen))).astype(np.float64)
        wrong = np.abs(seen.astype(np.float64) + residual - v) > unit
    if wrong.any():
        i = int(np.argmax(wrong))
        raise AssertionError(
            f"payload + residual is not x + residual at {np.count_nonzero(wrong)} elements, first [{i}]: "
            f"{seen[i]!r} + {residual[i]!r}, not {v[i]!r}" + (f" ({unit})" if isinstance(unit, str) else "")
        )


def payload_and_residual_make_up_the_input(c: Compressor) -> None:
    """What the payload does not hold stays in the residual, on all kinds of input."""
    for n in (1, 7, 64, 65, 1000, 5000):
        for kind, make in INPUTS.items():
            with case(f"n = {n}", kind):
                x = make(n)
                residual = np.nan_to_num(x[::-1] * np.float32(0.25), posinf=1, neginf=-1)
                v = sanitised(x, residual)
                payload = encode(c, x, residual)
                _conserves(c, v, decode(c, payload, n), residual)


def takes_what_is_not_finite_as_tamed(c: Compressor) -> None:
    """NaN counts as 0 and what is too large as ±LIMIT: the payload is that of the sanitised values."""
    for n in (1, 65, 1000, 5000):
        for kind, make in WILD.items():
            with case(f"n = {n}", kind):
                x, residual = make(n), gaussian(n, 1)
                same = same_bits(encode(c, x), encode(c, sanitised(x)))
                assert same, "without a residual the payload is not that of the sanitised input"
                v, rest = sanitised(x, residual), np.full(n, -0.0, np.float32)  # -0.0 adds nothing to any value
                same = same_bits(encode(c, x, residual), encode(c, v, rest))
                assert same, "with a residual the payload is not that of the sanitised sum"
                assert same_bits(residual, rest), "the residual is not that of the sanitised sum"
                _goes_on(c, x)


def _goes_on(c: Compressor, wild: np.ndarray) -> None:
    """After a bad step the next ones are finite, and what is left of it is finite."""
    n, watch = wild.size, Watch()
    context, residual = Watched(KEY, SHARED, watch=watch), watch.floats("residual", np.zeros(n, np.float32))
    for x in (wild, gaussian(n), gaussian(n, 1)):
        payload = encode(c, x, residual, context)
        c.update_from_aggregate(payload, n, context)
        assert np.isfinite(decode(c, payload, n)).all(), "decoded values are not finite"
        assert np.isfinite(residual).all(), "the residual is not finite"
        _finite_state(context)
    watch.check()


def _finite_state(context: Context) -> None:
    for name, array in context.state.items():
        assert np.isfinite(array).all(), f"state {name} is not finite"


def zero_stays_zero(c: Compressor) -> None:
    """Zeros decode to zeros and leave nothing: it follows from C(2x) = 2C(x), and from every bound on the error."""
    for n in (1, 65, 1000):
        if not c.homogeneous and not bounds(c, n):
            continue
        with case(f"n = {n}"):
            x, residual = np.zeros(n, np.float32), np.zeros(n, np.float32)
            seen = decode(c, encode(c, x, residual), n)
            assert not seen.any(), f"decodes to {seen[seen != 0][0]!r}"
            assert not residual.any(), f"leaves {residual[residual != 0][0]!r}"
            assert not compress(c, x).any(), "decodes to something without a residual"


def residual_makes_no_difference_to_the_payload(c: Compressor) -> None:
    """An empty residual gives the payload that none at all gives; the same call gives the same bytes."""
    for n in (1, 65, 1000):
        for kind, make in TAME.items():
            with case(f"n = {n}", kind):
                x = make(n)
                payload = encode(c, x, np.full(n, -0.0, np.float32))
                assert same_bits(payload, encode(c, x)), "another payload than without a residual"


def scales_with_powers_of_two(c: Compressor) -> None:
    """C(2ʲx) = 2ʲC(x) bit for bit, away from denormal halves and from saturation."""
    if not c.homogeneous:
        return
    x = gaussian(5000)
    x, before = np.copysign(np.maximum(np.abs(x), np.float32(0.01)), x), gaussian(5000, 1) * np.float32(1e-3)
    first = before.copy()
    seen = decode(c, encode(c, x, first), x.size)
    for power in (-6, -1, 5):
        factor = np.float32(2.0**power)
        second = before * factor
        got = decode(c, encode(c, x * factor, second), x.size)
        wrong = np.count_nonzero(got != seen * factor)
        assert not wrong, f"C(2^{power} x) differs from 2^{power} C(x) at {wrong} of 5000 elements"
        assert np.array_equal(second, first * factor), f"the residual does not scale by 2^{power}"


_QUICK = settings(
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    max_examples=15,
)


@_QUICK
@example(x=np.array([1, np.nan, -np.inf, 3e38, -1e-45], np.float32), scale=1.0, key=1)
@given(
    x=hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32)),
    scale=st.sampled_from([1.0, 1e-3, 2.0**-140, 2.0**120]),
    key=st.integers(0, 2**64 - 1),
)
def _any_input(c: Compressor, x: np.ndarray, scale: float, key: int) -> None:
    with case(f"x = {x.tolist()}, scale = {scale}, key = {key:#x}"):
        context = Context(key, key ^ SHARED)
        with np.errstate(all="ignore"):
            residual = sanitised(np.roll(x, 1) * np.float32(scale))
        v = sanitised(x, residual)
        seen = decode(c, encode(c, x, residual, context), x.size, context)
        _conserves(c, v, seen, residual)
        if not randomness(c) and x.size:
            _within(c, v, np.array([error(v, seen)]))


def takes_any_input(c: Compressor) -> None:
    """Whatever the float32 values and the key: finite, conserved and, without randomness, contracted."""
    _any_input(c)


# --- how large the error is -------------------------------------------------------------------------------------------


def _within(c: Compressor, x: np.ndarray, errors: np.ndarray) -> None:
    """The mean of the squared errors is within what the method promises.

    For several keys the promise is about the expectation: room for chance is left by the spread of the errors, and for
    events too rare to be seen, which weigh as much as an element does.
    """
    total, count = square(x), errors.size
    chance, rare = 0.0, 0.0
    if count > 1:
        chance = SIGMAS * float(errors.std(ddof=1)) / np.sqrt(count)
        rare = SIGMAS**2 / count * float(np.max(np.square(x, dtype=np.float64)))
    below = square(x[np.abs(x) < TINY])
    for name, bound in bounds(c, x.size).items():
        allowed = bound * total * (1 + 1e-5) + below + chance + max(1.0, bound) * rare + 4 * x.size * QUANTUM**2
        assert errors.mean() <= allowed, f"‖x - C(x)‖² = {errors.mean() / total:.6g} ‖x‖², but {name} is {bound:.6g}"


def _errors(c: Compressor, x: np.ndarray, keys: int) -> np.ndarray:
    """``‖x - C(x)‖²`` for as many keys, for one if the method does not depend on them."""
    contexts = seeds(keys if randomness(c) else 1)
    return np.array([error(x, compress(c, x, context)) for context in contexts])


def keeps_its_bounds(c: Compressor) -> None:
    """E‖x - C(x)‖² ≤ (1 - δ)‖x‖² and, for unbiased methods, ≤ ω‖x‖², for every x."""
    for n in (1, 7, 65, 300, 5000):
        for kind, make in TAME.items():
            if bounds(c, n) and kind != "zero":
                with case(f"n = {n}", kind):
                    _within(c, make(n), _errors(c, make(n), 100 if n < 5000 else 12))


def keeps_its_bounds_on_bad_inputs(c: Compressor) -> None:
    """The same where quantisers do worst: one large value a block, and all others just below or above half a step."""
    for n in (3, 200, 2500):
        if bounds(c, n):
            for ratio in np.geomspace(1e-4, 1, 25):
                with case(f"n = {n}", f"one 1 and the others {ratio:.4g}"):
                    x = np.full(n, ratio, np.float32)
                    x[::2] *= -1
                    x[n // 3] = 1
                    _within(c, x, _errors(c, x, 20))


def keeps_its_bound_for_every_element(c: Compressor) -> None:
    """``|x - C(x)| ≤ largest_error`` for every element, and values that are refused are not finite or beyond it."""
    for n in (1, 2, 64, 65, 1000, 5000) if c.bounded else ():
        for kind, make in (INPUTS | SMOOTH).items():
            with case(f"n = {n}", kind):
                x = make(n)
                finite = bool(np.isfinite(x).all())
                assert finite or c.refusal(x, Journey(), Context()), "values that are not finite are taken"
                wide = sanitised(x).astype(np.float64)
                spread, largest = float(np.abs(np.diff(wide)).max(initial=0)), float(np.abs(wide).max())
                allowed = c.largest_error(spread, largest, Journey())
                off = float(np.abs(wide - compress(c, x)).max())
                assert off <= allowed, f"off by {off:.6g}, but at most {allowed:.6g} was promised"


def error_on_gaussian_values(c: Compressor) -> None:
    """On independent normal values the error is the one that analysis gives, else at least within the bounds."""
    n = 1 << 20
    x = gaussian(n)
    errors, expected = _errors(c, x, 3), c.gaussian_error(n)
    _within(c, x, errors)
    if expected is not None:
        got = errors.mean() / square(x)
        assert abs(got - expected) <= 0.025 * expected + 1e-13, f"‖x - C(x)‖²/‖x‖² = {got:.5g}, not {expected:.5g}"


# --- what is random ---------------------------------------------------------------------------------------------------


def keys_matter_as_they_should(c: Compressor) -> None:
    """The same seeds give the same bytes; every half of a seed counts; unbiased methods are random."""
    x = gaussian(5000)
    assert same_bits(encode(c, x), encode(c, x)), "the same call gives other bytes"
    omega = c.variance(5000)
    assert omega is None or omega == 0 or randomness(c), "unbiased, with variance, yet it depends on no seed"
    for name in sorted(randomness(c)):
        for bit in (0, 31, 32, 63):
            assert _counts(c, x, name, bit), f"bit {bit} of {name} makes no difference"


def _counts(c: Compressor, x: np.ndarray, name: str, bit: int) -> bool:
    """Whether a bit of a seed ever makes a difference. A method that draws one of two things needs several seeds."""
    for context in seeds(24):
        first = {"key": context.key, "shared": context.shared}
        second = {**first, name: first[name] ^ 1 << bit}
        if not same_bits(*(encode(c, x, None, Context(**seed)) for seed in (first, second))):
            return True
    return False


def is_unbiased(c: Compressor) -> None:
    """The mean error over many keys is 0, tested along several directions and as a whole."""
    n, keys = 1000, 400
    if c.variance(n) is None:
        return
    for kind in ("gaussian", "many scales", "constant"):
        with case(f"n = {n}", kind):
            x = TAME[kind](n)
            errors = np.stack([compress(c, x, context) - x.astype(np.float64) for context in seeds(keys)])
            _no_bias_along(x, errors)
            _no_bias_as_a_whole(x, errors)


def _no_bias_along(x: np.ndarray, errors: np.ndarray) -> None:
    """z-tests of the error's component along x, its signs, a constant and random directions."""
    wide = x.astype(np.float64)
    random = np.random.default_rng(3).standard_normal((5, x.size)) * np.abs(wide)
    directions = {"x": wide, "sgn x": np.sign(wide), "1": np.ones(x.size)}
    directions |= {f"random direction {i}": r for i, r in enumerate(random)}
    for name, direction in directions.items():
        along = errors @ direction
        slack = SIGMAS * along.std(ddof=1) / np.sqrt(along.size) + 1e-6 * float(np.abs(wide) @ np.abs(direction))
        assert abs(along.mean()) <= slack, f"biased along {name}: {along.mean():.4g}, by chance at most {slack:.4g}"


def _no_bias_as_a_whole(x: np.ndarray, errors: np.ndarray) -> None:
    """The squared length of the bias, without its own bias: the mean product of the errors of two different keys."""
    gram = errors @ errors.T
    pairs = gram[~np.eye(len(gram), dtype=bool)]
    slack = SIGMAS * np.sqrt(2 * np.mean(pairs**2) / pairs.size) + 1e-12 * square(x)
    assert pairs.mean() <= slack, f"biased: ‖E e‖² = {pairs.mean():.4g}, by chance at most {slack:.4g}"


def neighbours_are_rounded_independently(c: Compressor) -> None:
    """For methods that draw for each element: the errors of neighbours are not correlated."""
    n, keys = 4096, 60
    if c.variance(n) is None or randomness(c) != {"key"}:
        return
    x = np.abs(gaussian(n))  # of one sign, or products of neighbours would cancel
    errors = np.stack([compress(c, x, context) - x.astype(np.float64) for context in seeds(keys)])
    for distance in (1, 2, 4, 8, 64):
        products = np.sum(errors[:, :-distance] * errors[:, distance:], axis=1)
        slack = SIGMAS * products.std(ddof=1) / np.sqrt(keys)
        assert abs(products.mean()) <= slack, f"errors at a distance of {distance} are correlated"


def ranks_round_independently(c: Compressor) -> None:
    """Ranks whose keys follow one another draw independently, or the mean would not be better than one of them."""
    n, pairs = 1000, 200
    if c.variance(n) is None or "key" not in randomness(c):
        return
    x = gaussian(n)
    wide, products = x.astype(np.float64), []
    for context in seeds(pairs):
        following = replace(context, key=(context.key + 1) % 2**64)
        products.append(float((compress(c, x, context) - wide) @ (compress(c, x, following) - wide)))
    slack = SIGMAS * np.std(products, ddof=1) / np.sqrt(pairs) + 1e-12 * square(x)
    assert abs(np.mean(products)) <= slack, "the errors of ranks with neighbouring keys are correlated"


def same_bytes_on_any_number_of_threads(c: Compressor) -> None:
    n, results = 3 * PARALLEL_MIN + 1003, []
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        try:
            residual, out = gaussian(n, 1), gaussian(n, 2)
            payload = encode(c, gaussian(n), residual)
            c.decode_add(payload, out, Context(~KEY, SHARED))
            results.append((payload, residual, out, encode(c, gaussian(n)), decode(c, payload, n)))
        finally:
            numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    names = ("payload", "residual", "sum of decode_add", "payload without residual", "decoded values")
    wrong = [name for name, a, b in zip(names, *results) if not same_bits(a, b)]
    assert not wrong, f"one thread and two give another {' and another '.join(wrong)}"


# --- several ranks ----------------------------------------------------------------------------------------------------


def halves_make_the_whole(c: Compressor) -> None:
    """``summarise`` and an encode with that summary do what encode does alone; all of the summary is written."""
    for n in (1, 65, 1000):
        wanted = c.summary(n)
        if wanted is None:
            continue
        for kind, make in INPUTS.items():
            with case(f"n = {n}", kind):
                whole, residuals = gaussian(n, 1), [gaussian(n, 1), gaussian(n, 1)]
                payload = encode(c, make(n), whole)
                summaries = [np.full(wanted.size, fill, np.float32) for fill in (0, np.nan)]
                for summary, residual in zip(summaries, residuals):
                    context = Context(KEY, SHARED)
                    c.summarise(make(n), summary, residual, context)
                    assert not np.isnan(summary).any(), "the summary holds NaN"
                    assert same_bits(residual, sanitised(make(n), gaussian(n, 1))), (
                        "residual is not sanitise(x + residual)"
                    )
                    again = encode(c, make(n), residual, replace(context, summary=summary))
                    assert same_bits(again, payload), "another payload than encode alone"
                    assert same_bits(residual, whole), "another residual than encode alone"
                assert same_bits(*summaries), "the summary depends on what its memory held"


def _ranks() -> list[Context]:
    return [Context(KEY + rank, SHARED, 0, RANKS) for rank in range(RANKS)]


def _agreed(c: Compressor, xs: Any, residuals: Any, ranks: list[Context]) -> list[np.ndarray]:
    """The payload of every rank, encoded with the summary that the ranks agree on."""
    wanted = c.summary(xs[0].size)
    if wanted is not None:
        own = np.full((len(xs), wanted.size), np.nan, np.float32)
        for x, summary, residual, context in zip(xs, own, residuals, ranks):
            c.summarise(x, summary, residual, context)
        with np.errstate(over="ignore"):
            agreed = own.sum(axis=0) if wanted.operator == "sum" else own.max(axis=0)
        ranks = [replace(context, summary=agreed.copy()) for context in ranks]
    return [encode(c, *each) for each in zip(xs, residuals, ranks)]


def summed(c: Compressor, payloads: list[np.ndarray], n: int) -> tuple[np.ndarray, int]:
    """The payload of the sum, and how many elements were saturated in it: what a collective makes of the payloads."""
    head = c.header(n)
    kind = np.uint16 if c.element == "bfloat16" else np.dtype(c.element)
    bodies = [p[head:].view(kind) for p in payloads]
    if c.element == "bfloat16":
        total = sum((b.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for b in bodies)
        return np.concatenate([payloads[0][:head], _to_bfloat16(total).view(np.uint8)]), 0
    if np.issubdtype(kind, np.integer):
        exact = sum(b.astype(np.int64) for b in bodies)
        limits = np.iinfo(kind)
        clipped = np.clip(exact, limits.min, limits.max)
        return np.concatenate([payloads[0][:head], clipped.astype(kind).view(np.uint8)]), int(np.sum(exact != clipped))
    with np.errstate(over="ignore"):
        total = sum(b.astype(np.float32) for b in bodies).astype(kind)
    return np.concatenate([payloads[0][:head], total.view(np.uint8)]), 0


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


_SUM_ROUNDING = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def decodes_the_sum(c: Compressor) -> None:
    """For linear methods: headers agree, and the summed payload decodes to the sum of what the payloads decode to."""
    for n in (1, 65, 1000, 5000):
        for kind in ("gaussian", "one-hot", "zero", "denormal") if c.linear else ():
            with case(f"n = {n}", kind, f"{RANKS} ranks"):
                noise = np.float32(kind == "gaussian")
                xs = [TAME[kind](n) * np.float32(1 + 0.1 * r) + gaussian(n, r) * noise for r in range(RANKS)]
                _decodes_the_sum(c, xs, [gaussian(n, 10 + r) * noise for r in range(RANKS)], _ranks())


def _decodes_the_sum(c: Compressor, xs: Any, residuals: Any, ranks: list[Context]) -> None:
    n, vs = xs[0].size, [sanitised(x, r) for x, r in zip(xs, residuals)]
    payloads = _agreed(c, xs, residuals, ranks)
    assert len({p[: c.header(n)].tobytes() for p in payloads}) == 1, "the ranks' headers differ"
    parts = [decode(c, p, n, context) for p, context in zip(payloads, ranks)]
    for v, part, residual in zip(vs, parts, residuals):
        _conserves(c, v, part, residual)
    payload, saturated = summed(c, payloads, n)
    got, expected = decode(c, payload, n, ranks[0]), np.sum(parts, axis=0, dtype=np.float64)
    assert saturated <= 0.05 * n + 1, f"{saturated} sums of {n} saturate on {RANKS} ranks"
    if not saturated:
        scale = sum(np.sqrt(square(part)) for part in parts)
        slack = _SUM_ROUNDING.get(c.element or "", 1e-6) * scale + np.sqrt(n) * 8 * QUANTUM
        off = np.sqrt(error(expected, got))
        assert off <= slack, f"decode of the sum is off by {off:.4g}, rounding explains {slack:.4g} of {scale:.4g}"
    for context in ranks:
        c.update_from_aggregate(payload, n, context)
        _finite_state(context)


def several_steps_go_on(c: Compressor) -> None:
    """Steps on several ranks, with what is kept between them: what holds for the first step holds for the next.

    (Methods that sum up gradients in a state of their own compress that, not ``x + residual``; and are not linear.)
    """
    n, ranks = 600, _ranks()
    residuals = [np.zeros(n, np.float32) for _ in ranks]
    for step in range(5):
        with case(f"n = {n}, step {step}, {RANKS} ranks"):
            xs = [gaussian(n, 100) + gaussian(n, 10 * step + rank) for rank in range(RANKS)]
            ranks = [replace(context, shared=SHARED + step, step=step) for context in ranks]
            if c.linear:
                _decodes_the_sum(c, xs, residuals, ranks)
            else:
                _step(c, xs, residuals, ranks)


def _step(c: Compressor, xs: Any, residuals: Any, ranks: list[Context]) -> None:
    for x, residual, context in zip(xs, residuals, ranks):
        v = sanitised(x, residual)
        seen = decode(c, encode(c, x, residual, context), x.size, context)
        if not context.state:
            _conserves(c, v, seen, residual)
        assert np.isfinite(seen).all() and np.isfinite(residual).all()
        _finite_state(context)


def tensors_have_shapes(c: Compressor) -> None:
    """``shaped`` gives a method for tensors of that shape, which obeys as well."""
    for shape in ((), (1,), (600,), (1, 600), (600, 1), (20, 30), (30, 20), (4, 5, 6, 5), (7, 11)):
        with case(f"shape {shape}"):
            n, shaped = int(np.prod(shape)), c.shaped(shape)
            assert type(shaped) is type(c), f"shaped is a {type(shaped).__name__}"
            assert shaped.shaped(shape) == shaped, "shaped is not the same when it is shaped again"
            _sizes_are_consistent(shaped, n)
            _promises_are_consistent(shaped, n)
            _decodes_or_refuses(shaped, np.full(shaped.nbytes(n), 0xFF, np.uint8), n)
            xs, residuals = [gaussian(n, r) for r in range(RANKS)], [gaussian(n, 10 + r) for r in range(RANKS)]
            (_decodes_the_sum if c.linear else _step)(shaped, xs, residuals, _ranks())
            _within(shaped, xs[0], _errors(shaped, xs[0], 50))


def ranks_may_hold_anything(c: Compressor) -> None:
    """Agreed summaries that overflow, and ranks with nothing at all: payload and residual stay finite."""
    for n in (1, 65, 1000):
        for kinds in (("huge", "huge", "huge"), ("NaN and Inf", "zero", "gaussian"), ("zero", "zero", "large")):
            with case(f"n = {n}", *kinds):
                residuals, ranks = [gaussian(n, r) for r in range(RANKS)], _ranks()
                xs = [INPUTS[kind](n) for kind in kinds]
                vs = [sanitised(x, r) for x, r in zip(xs, residuals)]
                for payload, context, v, residual in zip(_agreed(c, xs, residuals, ranks), ranks, vs, residuals):
                    _conserves(c, v, decode(c, payload, n, context), residual)


def finalizes(c: Compressor) -> None:
    """``finalize`` changes only the array that it is given, and leaves finite values finite."""
    for n in SIZES:
        with case(f"n = {n}"):
            watch = Watch()
            out = watch.floats("out", gaussian(n))
            c.finalize(out)
            watch.check()
            assert np.isfinite(out).all()


# --- steps and damage -------------------------------------------------------------------------------------------------


def feedback_stays_bounded(c: Compressor) -> None:
    """With feedback the residual over 200 random gradients stays below what its δ promises, 2·√(1 - δ)/δ times them.

    (Karimireddy et al., 2019.) It also stays below what sending nothing would leave; methods with a momentum of their
    own, up to 0.9, may have ten times as much to send.
    """
    n, steps, worst = 1000, 200, 0.0
    if not c.contraction(n) > 0:
        return
    residual, state, total = np.zeros(n, np.float32), {}, np.zeros(n)
    for step, context in enumerate(seeds(steps)):
        x = gaussian(n, step)
        context = Context(context.key, context.shared, step, 1, context.workspace, state)
        payload = encode(c, x, residual, context)
        c.update_from_aggregate(payload, n, context)
        total += x.astype(np.float64) - decode(c, payload, n, context)
        worst = max(worst, float(np.sqrt(square(residual) / n)))
    nothing, delta = 1.5 * np.sqrt(steps), c.contraction(n)
    allowed = 10 * nothing if state else min(nothing, 2.2 * np.sqrt(1 - delta) / delta + 1e-3)
    assert worst <= allowed, f"the residual reached {worst:.4g} times the gradients"
    if not state:
        lost = np.abs(total - residual).max()
        assert lost <= steps * EPS * (worst + 1) * 8, f"over {steps} steps {lost:.4g} was lost or invented"


def survives_damage(c: Compressor) -> None:
    """Any bytes decode to finite values or raise PayloadError, and nothing beside the arrays is touched."""
    for n in (1, 65, 1000, 5000):
        good = encode(c, gaussian(n))
        for what, payload in _damaged(good):
            with case(f"n = {n}", what):
                _decodes_or_refuses(c, payload, n)
        for length in {0, good.size // 2, good.size - 1} - {good.size}:
            _refused(f"a payload cut to {length} bytes", c.decode, good[:length].copy(), np.zeros(n, np.float32))


def _damaged(good: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        yield f"all bytes {fill:#x}", np.full_like(good, fill)
    for i in range(20):
        yield f"random bytes {i}", rng.integers(0, 256, good.size, np.uint8)
        words = rng.choice(SPECIAL_WORDS, -(-good.size // 4)).view(np.uint8)[: good.size]
        yield f"special words {i}", words.copy()
        flipped = good.copy()
        flipped[rng.integers(0, good.size, 3)] ^= np.uint8(1 << rng.integers(0, 8))
        yield f"flipped bits {i}", flipped
        mixed = np.where(rng.random(good.size) < 0.8, good, words)
        yield f"special bytes {i}", mixed


def _decodes_or_refuses(c: Compressor, payload: np.ndarray, n: int) -> None:
    watch = Watch()
    damaged = watch.empty("payload", payload.size, np.uint8, 16)
    damaged[...] = payload
    for method, out in (
        ("decode", watch.empty("out", n, np.float32, 4)),
        ("decode_add", watch.floats("out", one_hot(n))),
    ):
        with suppress(PayloadError):
            getattr(c, method)(damaged, out, Watched(KEY, SHARED, watch=watch))
            assert np.isfinite(out).all(), f"{method} gives values that are not finite"
    with suppress(PayloadError):
        c.update_from_aggregate(damaged, n, Watched(KEY, SHARED, watch=watch))
    watch.check()
    assert same_bits(damaged, payload), "decoding changed the payload"


@_QUICK
@given(n=st.integers(1, 200), data=st.data())
def _any_payload(c: Compressor, n: int, data: Any) -> None:
    payload = data.draw(st.binary(min_size=c.nbytes(n), max_size=c.nbytes(n)))
    _decodes_or_refuses(c, np.frombuffer(payload, np.uint8), n)


def survives_any_payload(c: Compressor) -> None:
    """The same for bytes that hypothesis makes up."""
    _any_payload(c)


LAWS: list[Law] = [
    spec_reads_back,
    metadata_is_consistent,
    schedules_settle,
    refuses_arrays_that_do_not_fit,
    writes_its_arrays_and_nothing_else,
    decode_add_adds,
    allocates_nothing_in_the_steady_state,
    payload_and_residual_make_up_the_input,
    takes_what_is_not_finite_as_tamed,
    zero_stays_zero,
    residual_makes_no_difference_to_the_payload,
    scales_with_powers_of_two,
    takes_any_input,
    keeps_its_bounds,
    keeps_its_bounds_on_bad_inputs,
    keeps_its_bound_for_every_element,
    error_on_gaussian_values,
    keys_matter_as_they_should,
    is_unbiased,
    neighbours_are_rounded_independently,
    ranks_round_independently,
    same_bytes_on_any_number_of_threads,
    halves_make_the_whole,
    decodes_the_sum,
    several_steps_go_on,
    tensors_have_shapes,
    ranks_may_hold_anything,
    finalizes,
    feedback_stays_bounded,
    survives_damage,
    survives_any_payload,
]
