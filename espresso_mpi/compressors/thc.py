"""``thc``: rotated, then whole numbers that add up (THC, Li et al., NSDI 2024); 8 or 16 bits per element.

All ranks rotate their blocks by the same random rotation (``cpu.rotations``) and agree on the largest root mean square
``a`` of each block. Each rotated element is clipped to ±M = ±t·a and rounded stochastically to one of -G..G times M/G.
The payloads of all ranks then are summed as integers, without decoding on the way; ``sum · M/G``, rotated back, is the
sum. The rotation makes the elements nearly normal whatever they were, so few of them are clipped; with error feedback
what was clipped is in the residual. Sums stay in range for certain where ``ranks · G ≤ 127`` (int16: 32767). Beyond
that they saturate where the ranks are alike, which costs accuracy; the collectives count it.

The paper agrees on one norm for a tensor, which it rotates whole. Blocks differ in size, so here each has its own
(0.4 % more bytes), and the error is bounded for every x: with y a rotated element divided by ``a``, rounding costs at
most (M/2G)², and clipping ``E(|y| - t)₊² ≤ 3/(16t²)`` (see ``eden``), so together ``t²/4G² + 3/16t²`` of the largest
rank's ``‖x‖²``, which is this rank's if it is alone. For Gaussian values it is .0222 at G = 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray, prange

from .base import Compressor
from .by_address import Entry, KernelCall
from .checks import check_choice, check_number, check_positive_int
from .context import Context, Summary
from .kernels.cpu import entries, host, rotations
from .kernels.cpu.flips import square_sum
from .kernels.cpu.hadamard import transform
from .registry import register

MAGIC = 12582912.0  # 1.5 * 2**23: adding it to a small float leaves the rounded integer in the low mantissa bits
SMALLEST_NORM = 1e-33  # of a block that is not sent as zeros: TINY / √4096 is above it
MOST = 1e30  # the largest factor by which values are multiplied; only a wrong agreement could ask for more

_ROOM, _WORDS = 3 * rotations.LARGEST, rotations.LARGEST // 32


@register
@dataclass(frozen=True)
class Thc(Compressor):
    """Homomorphic quantisation. Payload: the header (uint64 seed of the rotation, 8 zero bytes, float32 root mean
    square of each block, zeros up to a multiple of 16), then an integer for each element and for the zeros that pad the
    last block to a power of two.

    Args:
        block: elements that are rotated together: a power of two from 64 to 4096.
        levels: G, the largest code.
        clip: t, where to clip, in root mean squares; 0 is what gives the least error for normal values.
        element: "int8" or "int16", which takes sums of more ranks.
    """

    block: int = 1024
    levels: int = 7
    clip: float = 0.0
    element: str = "int8"
    name = "thc"
    powers_of_two = ("block",)
    common = True
    examples = ("thc:block=64,levels=31", "thc:element=int16,levels=100", "thc:levels=1,clip=2.0")

    def __post_init__(self) -> None:
        rotations.check_block("thc", self.block)
        check_choice("thc", "element", self.element, ("int8", "int16"))
        check_positive_int("thc", "levels", self.levels, 1, int(np.iinfo(self.element).max))
        check_number("thc", "clip", self.clip, 0, 64)

    @property
    def clipped_at(self) -> float:
        """t: where values are clipped, in root mean squares."""
        return self.clip or best_clip(self.levels, self.block)

    def nbytes(self, n: int) -> int:
        return self.header(n) + rotations.padded(n, self.block) * np.dtype(self.element).itemsize

    def header(self, n: int) -> int:
        return 16 + -(-4 * rotations.count(n, self.block) // 16) * 16 if n else 0

    def contraction(self, n: int) -> float:
        t = self.clipped_at
        if t < 0.1:  # so little of a rotated element is left that the bound on clipping, 3/16t², says nothing
            return 0.0
        return max(0.0, 1 - t * t / (4 * self.levels**2) - 3 / (16 * t * t))

    def gaussian_error(self, n: int) -> float:
        return quantisation_error(self.clipped_at, self.levels, self.block)

    def encode_traffic(self, n: int) -> int:
        """The summary must be there before the first value is encoded: the residual is read and written twice."""
        return 20 * n + self.nbytes(n)

    def summary(self, n: int) -> Summary:
        return Summary(rotations.count(n, self.block), "max")

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        _summarise(x, host.EMPTY if residual is None else residual, summary, self.block)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        seed, norms, codes = self._split(payload, x.size)
        low, high = host.key_words(context.shared)
        seed[0], seed[1], seed[2:] = low, high, 0
        norms[context.summary.size :] = 0
        kept = host.EMPTY if residual is None else residual
        rules = (self.block, np.float32(self.levels), self._unit, self._top)
        _encode(x, kept, context.summary, norms, codes, *rules, low, high, *host.key_words(context.key))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        seed, norms, codes = self._split(payload, out.size)
        _decode(out, norms, codes, self.block, self._unit, self._top, add, seed[0], seed[1])

    # --- by address ---

    def summariser(self, n: int) -> KernelCall | None:
        needs: dict[str, Any] = {"shares": True, "grain": self.block, "summary": rotations.count(n, self.block)}
        return self._kernel(_summarise_at, n, **needs) if n else None

    def encoder(self, n: int) -> KernelCall | None:
        return self._kernel(_encode_at, n, draws=True, summary=rotations.count(n, self.block)) if n else None

    def decoder(self, n: int) -> KernelCall | None:
        return self._kernel(_decode_at, n) if n else None

    def _kernel(self, entry: Entry, n: int, **needs: Any) -> KernelCall:
        sizes = (self.block, self.header(n), float(self.element == "int16"))
        return KernelCall(entry, (*sizes, self.levels, float(self._unit), float(self._top)), **needs)

    # --- on GPUs ---

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import thc as cuda_thc

        cuda_thc.summarise(x, residual, summary, self.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import thc as cuda_thc

        seed, norms, codes = self._split(payload, x.size)
        rules = (np.float32(self.levels), self._unit, self._top)
        arrays, keys = (x, residual, context.summary, seed, norms, codes), (context.shared, context.key)
        cuda_thc.encode(arrays, self.block, rules, keys)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import thc as cuda_thc

        cuda_thc.decode(*self._split(payload, out.size), out, self.block, self._unit, self._top, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's parts as (uint32 seed, float32 norms with padding, integer codes) views."""
        head = self.header(n)
        return payload[:16].view(np.uint32), payload[16:head].view(np.float32), payload[head:].view(self.element)

    @property
    def _unit(self) -> np.float32:
        """What a code of 1 stands for, in root mean squares."""
        return np.float32(self.clipped_at / self.levels)

    @property
    def _top(self) -> np.float32:
        """A magnitude that no code exceeds, in sums either."""
        return np.float32(np.iinfo(self.element).max + 1)


# --- CPU kernels ------------------------------------------------------------------------------------------------------


@host.inline
def _norm(values, top):  # type: ignore[no-untyped-def]
    """The root mean square of a block whose largest magnitude has these bits."""
    if top < np.uint32(rotations.TINY_BITS):
        return np.float32(0)
    down, up = rotations.powers(top)
    return np.sqrt(square_sum(values, values.size // 64, down) / np.float32(values.size)) * up


@host.Kernel
def _summarise(x, residual, norms, block):  # type: ignore[no-untyped-def]
    keep, each = residual.size > 0, max(1, rotations.CHUNK // block)
    for chunk in prange((norms.size + each - 1) // each):
        room = carray(rotations.float_room(), _ROOM)
        for b in range(chunk * each, min(norms.size, (chunk + 1) * each)):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = rotations.block_size(stop - start, block)
            values, kept = x[start:stop], residual[start:stop]
            if size > stop - start:
                values = rotations.pad(room[block : block + size], values)
                if keep:
                    kept = rotations.pad(room[2 * block : 2 * block + size], kept)
            sanitised, top = rotations.take(values, kept, room[:size], keep)
            norms[b] = _norm(sanitised, top)
            if keep and size > stop - start:
                rotations.copy(residual[start:stop], kept)


@host.inline
def _agreed(norm):  # type: ignore[no-untyped-def]
    """The norm that ranks have agreed on, made harmless."""
    norm = host.sanitise(norm)
    return norm if norm >= np.float32(SMALLEST_NORM) else np.float32(0)


@host.inline
def _factor(up, root, step):  # type: ignore[no-untyped-def]
    """What to multiply rotated values by, so that a step of the codes is 1. The product root · step could overflow."""
    return min(up / step / root, np.float32(MOST))


@host.inline
def _round(w, codes, factor, levels, at, high):  # type: ignore[no-untyped-def]
    """Codes of rotated values, stochastically rounded; the values become the codes."""
    for i in range(w.size):
        noisy = host.fma(w[i], factor, host.uniform(at, high) - np.float32(0.5))
        shifted = min(max(noisy, -levels), levels) + np.float32(MAGIC)
        codes[i] = np.int16(host.float_bits(shifted))
        w[i] = shifted - np.float32(MAGIC)
        at = np.uint32(at + host.STEP)


@host.Kernel
def _encode(x, residual, summary, norms, codes, block, levels, unit, most, low, high, key_low, key_high):  # type: ignore[no-untyped-def]
    keep, each = residual.size > 0, max(1, rotations.CHUNK // block)
    for chunk in prange((summary.size + each - 1) // each):
        room, words = carray(rotations.float_room(), _ROOM), carray(rotations.word_room(), _WORDS)
        for b in range(chunk * each, min(summary.size, (chunk + 1) * each)):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = rotations.block_size(stop - start, block)
            buffer, spare, signs = room[:size], room[block : block + size], words[: size // 32]
            rotations.fill_signs(signs, start // 32, low, high)
            values = x[start:stop]
            if keep:
                values = residual[start:stop]  # ``summarise`` has left the sum there
            if size > stop - start:
                values = rotations.pad(room[2 * block : 2 * block + size], values)
            sanitised, top = rotations.take(values, values, spare, False)
            norms[b] = _agreed(summary[b])
            step, root = norms[b] * unit, np.sqrt(np.float32(size))
            packed = codes[start : start + size]
            if top < np.uint32(rotations.TINY_BITS) or step == np.float32(0):
                rotations.clear(packed)
                continue
            down, up = rotations.powers(top)
            rotations.rotate(buffer, sanitised, signs, down)
            _round(buffer, packed, _factor(up, root, step), levels, host.counter(start, key_low), key_high)
            if keep:
                transform(buffer)
                factor = rotations.scaled_back(buffer, step / root, most * np.float32(size))
                rotations.put(residual[start:stop], buffer, spare, signs, factor, rotations.SUBTRACT)


@host.Kernel
def _decode(out, norms, codes, block, unit, most, add, low, high):  # type: ignore[no-untyped-def]
    each, blocks = max(1, rotations.CHUNK // block), (out.size + block - 1) // block
    how = rotations.ADD if add else rotations.STORE
    for chunk in prange((blocks + each - 1) // each):
        room, words = carray(rotations.float_room(), _ROOM), carray(rotations.word_room(), _WORDS)
        for b in range(chunk * each, min(blocks, (chunk + 1) * each)):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = rotations.block_size(stop - start, block)
            buffer, signs = room[:size], words[: size // 32]
            rotations.fill_signs(signs, start // 32, low, high)
            packed = codes[start : start + size]
            for i in range(size):
                buffer[i] = np.float32(packed[i])
            transform(buffer)
            scale = norms[b] * unit / np.sqrt(np.float32(size))
            factor = rotations.scaled_back(buffer, scale, most * np.float32(size))
            rotations.put(out[start:stop], buffer, room[block : block + size], signs, factor, how)


# --- by address -------------------------------------------------------------------------------------------------------

_BLOCK, _HEADER, _WIDE, _LEVELS, _UNIT, _MOST, _NUMBERS = range(7)
"""Places of the parameters, and how many they are: elements of a block, bytes of the header, whether codes are int16,
the largest code, what a code of 1 stands for, and a magnitude that no code exceeds."""

_summarise_serial, _encode_serial, _decode_serial = _summarise.serial, _encode.serial, _decode.serial


@host.inline
def _norms_at(payload, numbers):  # type: ignore[no-untyped-def]
    """The norms of a payload with what fills them up."""
    return entries.floats(payload + 16, (np.int64(numbers[_HEADER]) - 16) // 4)


@host.inline
def _codes_at(payload, n, numbers):  # type: ignore[no-untyped-def]
    """Where codes of a payload begin, and how many they are."""
    block = np.int64(numbers[_BLOCK])
    last = (n - 1) // block * block
    return payload + np.int64(numbers[_HEADER]), last + rotations.block_size(n - last, block)


@host.inline
def _encode_codes(x, kept, summary, norms, codes, numbers, seed, key):  # type: ignore[no-untyped-def]
    block, levels, unit = np.int64(numbers[_BLOCK]), np.float32(numbers[_LEVELS]), np.float32(numbers[_UNIT])
    low, high = host.key_from(key, 0)
    most = np.float32(numbers[_MOST])
    _encode_serial(x, kept, summary, norms, codes, block, levels, unit, most, seed[0], seed[1], low, high)


@entries.Entry
def _summarise_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Also writes the seed of the rotation to the payload."""
    numbers, seed = entries.doubles(parameters, _NUMBERS), entries.words(payload, 2)
    seed[0], seed[1] = np.uint64(key), np.uint64(0)
    block = np.int64(numbers[_BLOCK])
    norms = entries.floats(entries.integers(state, 1)[0] + 4 * (first // block), (n + block - 1) // block)
    _summarise_serial(entries.floats(x, n), entries.floats_if(residual, n), norms, block)
    return 0


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    numbers, norms = entries.doubles(parameters, _NUMBERS), _norms_at(payload, entries.doubles(parameters, _NUMBERS))
    block = np.int64(numbers[_BLOCK])
    summary = entries.floats(entries.integers(state, 1)[0], (n + block - 1) // block)
    norms[summary.size :] = np.float32(0)
    values, kept, seed = entries.floats(x, n), entries.floats_if(residual, n), entries.words32(payload, 2)
    begin, size = _codes_at(payload, n, numbers)
    if numbers[_WIDE] != 0:
        _encode_codes(values, kept, summary, norms, entries.shorts(begin, size), numbers, seed, key)
    else:
        _encode_codes(values, kept, summary, norms, entries.codes8(begin, size), numbers, seed, key)
    return 0


@entries.Entry
def _decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    numbers, norms = entries.doubles(parameters, _NUMBERS), _norms_at(payload, entries.doubles(parameters, _NUMBERS))
    out, seed, (begin, size) = entries.floats(x, n), entries.words32(payload, 2), _codes_at(payload, n, numbers)
    block, unit, most = np.int64(numbers[_BLOCK]), np.float32(numbers[_UNIT]), np.float32(numbers[_MOST])
    if numbers[_WIDE] != 0:
        _decode_serial(out, norms, entries.shorts(begin, size), block, unit, most, add != 0, seed[0], seed[1])
    else:
        _decode_serial(out, norms, entries.codes8(begin, size), block, unit, most, add != 0, seed[0], seed[1])
    return 0


# --- errors -----------------------------------------------------------------------------------------------------------


def _density(y: np.ndarray, d: int) -> np.ndarray:
    """How elements y of d with mean square 1 are distributed, all directions being alike: normally for large d."""
    height = math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi * d)
    return height * np.maximum(0, 1 - y * y / d) ** ((d - 3) / 2)


def _integral(f: Any, a: np.ndarray, b: np.ndarray, nodes: int) -> float:
    """The sum of the integrals of f from a to b, by Gauss and Legendre."""
    at, weights = np.polynomial.legendre.leggauss(nodes)
    y = a[:, None] + (b - a)[:, None] * (at + 1) / 2
    return float(np.sum(f(y) * weights * (b - a)[:, None] / 2))


@lru_cache
def quantisation_error(t: float, levels: int, d: int) -> float:
    """``E(y - code·t/G)²`` of elements of a rotated block of d: rounding between a < y < b has variance (y-a)(b-y)."""
    step = t / levels
    a = step * np.arange(levels)
    rounding = _integral(
        lambda y: (y % step) * (step - y % step) * _density(y, d), a, a + step, 16 if levels < 256 else 3
    )
    tail = np.linspace(t, t + 8, 9)
    return 2 * rounding + 2 * _integral(lambda y: (y - t) ** 2 * _density(y, d), tail[:-1], tail[1:], 16)


@lru_cache
def best_clip(levels: int, d: int) -> float:
    """The t with the least error, by narrowing the bracket around the single minimum."""
    low, high = 0.5, 8.0
    while high - low > 1e-5:
        third = (high - low) / 3
        if quantisation_error(low + third, levels, d) < quantisation_error(high - third, levels, d):
            high -= third
        else:
            low += third
    return round((low + high) / 2, 3)
