"""What the laws are made of: inputs, arrays whose surroundings are watched, and short forms of encode and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np

from espresso_mpi.compressors import LIMIT, Compressor, Context, get

KEY = 0x0123_4567_89AB_CDEF
SHARED = 0xFEDC_BA98_7654_3210
GUARD = 64
RESERVED = ("residual", "mean", "average")
"""Names under which sessions keep arrays beside those of a method."""


def specs_of(name: str) -> list[str]:
    """A method's name and its class's examples."""
    return list(dict.fromkeys((name, *type(get(name)).examples)))


_AMOUNTS = {"rank", "cols", "rows", "columns", "beta", "mu", "value"}


def takes_another_branch(spec: str) -> bool:
    """Whether a kernel does something else than for the method's name alone, and not only more or less of the same."""
    method, plain = get(spec), get(spec.partition(":")[0])
    given = {field.name: getattr(method, field.name) for field in fields(method)}
    return any(not _only_an_amount(name, value) for name, value in given.items() if value != getattr(plain, name))


def _only_an_amount(name: str, value: Any) -> bool:
    if name == "ratio":
        return value != 1.0  # nothing is left out
    if name == "block":
        return value % 64 == 0  # whole words
    return name in _AMOUNTS


# --- inputs -----------------------------------------------------------------------------------------------------------


def gaussian(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def laplace(n: int) -> np.ndarray:
    return np.random.default_rng(1).laplace(size=n).astype(np.float32)


def one_hot(n: int) -> np.ndarray:
    x = np.zeros(n, np.float32)
    x[n // 2 : n // 2 + 1] = -3
    return x


def many_scales(n: int) -> np.ndarray:
    """Magnitudes over twelve decades."""
    return (gaussian(n) * 10.0 ** (6 * gaussian(n, 7).clip(-1, 1))).astype(np.float32)


def but_one(value: float) -> Callable[[int], np.ndarray]:
    """Makes Gaussian values of which one is something else."""

    def make(n: int) -> np.ndarray:
        x = gaussian(n)
        x[2 * n // 3 : 2 * n // 3 + 1] = value
        return x

    return make


def huge(n: int) -> np.ndarray:
    """Finite, but beyond LIMIT: sums of two overflow."""
    return np.sign(gaussian(n)) * np.float32(3e38)


def not_finite(n: int) -> np.ndarray:
    """Gaussian values among which NaN and both infinities are sprinkled, and one that is too large."""
    x = gaussian(n)
    x[1::5], x[2::11], x[3::13], x[5::17] = np.nan, np.inf, -np.inf, 3e38
    return x


TAME = {
    "gaussian": gaussian,
    "laplace": laplace,
    "constant": lambda n: np.full(n, -1.5, np.float32),
    "zero": lambda n: np.zeros(n, np.float32),
    "one-hot": one_hot,
    "many scales": many_scales,
    "denormal": lambda n: gaussian(n) * np.float32(1e-40),
    "large": lambda n: gaussian(n) * np.float32(1e30),
}
WILD = {
    "huge": huge,
    "NaN and Inf": not_finite,
    "all NaN": lambda n: np.full(n, np.nan, np.float32),
    "all Inf": lambda n: np.full(n, np.inf, np.float32),
    "one NaN": but_one(np.nan),
    "one Inf": but_one(-np.inf),
    "one too large": but_one(3e38),
}
INPUTS = TAME | WILD
SMOOTH = {
    "wave": lambda n: np.sin(np.arange(n) / 50).astype(np.float32),
    "wave far from zero": lambda n: (1e4 + np.sin(np.arange(n) / 50)).astype(np.float32),
    "steps of 1": lambda n: np.arange(n, dtype=np.float32),
}

SPECIAL_WORDS = np.array(
    [0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 999, 1000, 0x3F800000],
    np.uint32,
)
"""Bits that a damaged payload may hold: NaN, infinities, the extremes, indices around a size."""


def tamed(x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    """What is compressed, in plain numpy: the float32 sum, NaN as 0, at most LIMIT in magnitude."""
    with np.errstate(all="ignore"):
        v = x if residual is None else x + residual
    return np.clip(np.where(np.isnan(v), np.float32(0), v), np.float32(-LIMIT), np.float32(LIMIT))


# --- arrays whose surroundings are watched ----------------------------------------------------------------------------


class Guarded:
    """An array between two margins that must not change. Its address is ``offset`` modulo 64: no better aligned than
    the contract promises, so 16 for payloads and 4 for gradients."""

    def __init__(self, size: int, dtype: Any, offset: int) -> None:
        nbytes = size * np.dtype(dtype).itemsize
        whole = np.full(nbytes + 3 * GUARD, 0xA5, np.uint8)
        start = GUARD + (offset - whole.ctypes.data) % GUARD
        self._margins = (whole[:start], whole[start + nbytes :])
        self.array = whole[start : start + nbytes].view(dtype)

    def intact(self) -> bool:
        return all(bool((margin == 0xA5).all()) for margin in self._margins)


@dataclass
class Watch:
    """Hands out guarded arrays and looks after them all."""

    guarded: list[tuple[str, Guarded]] = field(default_factory=list)

    def empty(self, what: str, size: int, dtype: Any, offset: int, fill: int = 0xFF) -> np.ndarray:
        made = Guarded(size, dtype, offset)
        made.array.view(np.uint8)[...] = fill
        self.guarded.append((what, made))
        return made.array

    def floats(self, what: str, values: np.ndarray) -> np.ndarray:
        array = self.empty(what, values.size, np.float32, 4)
        array[...] = values
        return array

    def check(self) -> None:
        hit = sorted({what for what, each in self.guarded if not each.intact()})
        assert not hit, f"wrote outside of {', '.join(hit)}"


@dataclass
class Watched(Context):
    """A context whose scratch memory and state are guarded; scratch memory is full of NaN whenever it is asked for."""

    watch: Watch = field(default_factory=Watch)

    def scratch(self, name: str, size: int, dtype: Any, like: Any) -> Any:
        return self.watch.empty(f"scratch {name}", size, dtype, 16)

    def kept(self, name: str, size: int, like: Any) -> Any:
        assert name not in RESERVED, f"a session keeps something of its own under the name {name!r}"
        if name not in self.state:
            self.state[name] = self.watch.empty(f"state {name}", size, np.float32, 16, fill=0)
        return self.state[name]


# --- helpers ----------------------------------------------------------------------------------------------------------


def encode(c: Compressor, x: np.ndarray, residual: np.ndarray | None = None, context: Context | None = None) -> Any:
    payload = np.empty(c.nbytes(x.size), np.uint8)
    c.encode(x, payload, residual, context or Context(KEY, SHARED))
    return payload


def decode(c: Compressor, payload: np.ndarray, n: int, context: Context | None = None) -> np.ndarray:
    """As another rank decodes it: it knows what all ranks share, and nothing else."""
    context = context or Context(shared=SHARED)
    out = np.full(n, np.nan, np.float32)
    c.decode(payload, out, Context(~KEY, context.shared, context.step))
    return out


def compress(c: Compressor, x: np.ndarray, context: Context | None = None) -> np.ndarray:
    """``x`` as the receiver sees it."""
    return decode(c, encode(c, x, None, context), x.size, context)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def square(x: np.ndarray) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))


def error(x: np.ndarray, seen: np.ndarray) -> float:
    """``‖x - seen‖²``."""
    return square(x.astype(np.float64) - seen)


@contextmanager
def case(*what: Any) -> Iterator[None]:
    """Say in every failure at what size and on what input it was."""
    place = ", ".join(str(w) for w in what)
    try:
        yield
    except AssertionError as failure:
        raise AssertionError(f"{place}: {failure}") from None
    except Exception as failure:
        raise AssertionError(f"{place}: {type(failure).__name__}: {failure}") from failure


def seeds(count: int) -> Iterator[Context]:
    """Contexts with different keys and shared seeds."""
    for key, shared in np.random.default_rng(5).integers(0, 1 << 64, (count, 2), np.uint64):
        yield Context(int(key), int(shared))


@cache
def randomness(c: Compressor) -> frozenset[str]:
    """Which of the seeds of a context the payload depends on."""
    x = gaussian(5000)
    plain = encode(c, x)
    others = {"key": Context(KEY ^ 0x5_0000_0003, SHARED), "shared": Context(KEY, SHARED ^ 0x5_0000_0003)}
    return frozenset(name for name, other in others.items() if not same_bits(plain, encode(c, x, None, other)))


def bounds(c: Compressor, n: int) -> dict[str, float]:
    """What the method promises of ``E‖x - C(x)‖² / ‖x‖²``."""
    delta, omega = c.contraction(n), c.variance(n)
    return {
        **({"1 - contraction": 1 - delta} if delta > 0 else {}),
        **({"variance": omega} if omega is not None else {}),
    }
