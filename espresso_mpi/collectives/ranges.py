"""Limits of values, so that no sum over the ranks leaves the range of its type, and the treatment of larger values.

The mean of finite values is finite, but their sum may not be: two ranks with 3e38 each. The search for NaN also finds
the values for which that could happen. A dense tensor with such values is divided by a power of two while it travels,
which changes no bit except in the smallest values. A compressed one is refused, because its residual would have to be
scaled as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import device
from ..arrays.addresses import addresses
from ..compressors import LIMIT
from ..compressors.kernels.cpu.host import runs_serial
from ..types import TensorSpec
from .data import magnitudes, reduction
from .data.layout import Topology

_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
_BIAS = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}
_LARGEST = {name: (2 - 2.0 ** -_MANTISSA[name]) * 2.0 ** _BIAS[name] for name in _MANTISSA}

_SMALL, _JOINED = 2 << 10, 256 << 10
"""Bytes of an array that is searched together with others, and of all that are searched at once: a search of its own
takes longer to begin than to go through so little."""

_KNOWN = 1 << 14
"""Calls of which is kept what one compiled call searches: each parameter of a model may be pushed by one of its own."""

Findings = Mapping[int, Mapping[str, str]]
"""By rank and position of the tensor: the problem with its values; "" if they are only large."""


@dataclass(frozen=True)
class RangeLimits:
    """Where values of one type begin to be a problem, as the bits of their magnitudes.

    Attributes:
        large: sums over the ranks may leave the range.
        infinite: not finite, or not in float32 where a compressor works on that.
        most: ``large`` as text.
    """

    large: int
    infinite: int
    most: str


def limits(dtype: str, compressed: bool, topology: Topology) -> RangeLimits:
    """The limits of an element type.

    Sums of at most 2ᵏ values below 2¹²⁷⁻ᵏ are at most 2¹²⁷, whatever their order and rounding. float16 is summed in
    float32; but where nodes have unequal numbers of ranks, what a larger one has is more than a mean.
    """
    infinite = reduction.overflow_bits(dtype, compressed)
    spare = (topology.size - 1).bit_length()
    most = math.inf
    if compressed:
        most = LIMIT / 2.0**spare
    elif dtype == "float16" and excess(topology) > 1:
        most = _LARGEST[dtype] / excess(topology)
    elif dtype != "float16" and spare:
        most = 2.0 ** (_BIAS[dtype] - spare)
    return RangeLimits(min(infinite, _bits(most, dtype)), infinite, f"{most:.3g}")


def excess(topology: Topology) -> float:
    """By how much the sum of a node's ranks, divided by ``Topology.divisor``, may exceed each of them."""
    return max(map(len, topology.nodes)) / topology.divisor("intra")


def _bits(value: float, dtype: str) -> int:
    """The bits of the least number of a type that is not below ``value``; more than any has if there is none."""
    if value > _LARGEST[dtype]:
        return 1 << 63
    exponent = math.frexp(value)[1] - 1
    scaled = value * 2.0 ** (_MANTISSA[dtype] - exponent)
    return ((exponent + _BIAS[dtype]) << _MANTISSA[dtype]) + math.ceil(scaled) - (1 << _MANTISSA[dtype])


def shift(dtype: str, topology: Topology) -> int:
    """By which power of two large dense values are divided while they travel, so that all their sums are in range."""
    if dtype == "float16":
        return math.ceil(math.log2(excess(topology)))
    return (topology.size - 1).bit_length() + 1


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Portion:
    """Tensors of a call that are searched at once, by their positions: small ones of a kind, or one by itself.

    ``sizes``: elements of each if they are float32 in host memory; else empty.
    """

    positions: tuple[int, ...]
    dtype: str
    compressed: bool
    sizes: tuple[int, ...] = ()


def portions(tensors: Iterable[tuple[int, TensorSpec, bool, bool]]) -> tuple[Portion, ...]:
    """What is searched at once.

    Args:
        tensors: (position, description, whether it is to be compressed, whether the array there has all its elements)
            of each tensor with elements.
    """
    found, together, nbytes = list[Portion](), dict[tuple[str, bool], list[int]](), Counter[tuple[str, bool]]()
    sizes = dict[int, int]()

    def portion(positions: Sequence[int], kind: tuple[str, bool]) -> Portion:
        plain = [sizes[position] for position in positions if position in sizes]
        return Portion(tuple(positions), *kind, tuple(plain) if len(plain) == len(positions) else ())

    for position, spec, compressed, whole in tensors:
        kind = (str(spec.dtype), compressed)
        if whole and spec.dtype == "float32" and spec.device == "cpu":
            sizes[position] = spec.size
        if spec.nbytes > _SMALL or spec.device == "gpu":
            found.append(portion((position,), kind))
            continue
        together.setdefault(kind, []).append(position)
        nbytes[kind] += spec.nbytes
        if nbytes[kind] > _JOINED:
            del nbytes[kind]
            found.append(portion(together.pop(kind), kind))
    return (*found, *(portion(positions, kind) for kind, positions in together.items()))


class _Together(NamedTuple):
    """What one compiled call searches of the portions of a call: positions, sizes and limits; and the rest of them."""

    searched: Sequence[Portion]
    """Alive, so no other gets its id."""
    positions: Sequence[int]
    sizes: np.ndarray
    least: np.ndarray
    rest: Sequence[Portion]


class GpuSearch:
    """The search of the tensors of a call that are on a GPU, which is queued there while the host does something else.

    Args:
        portions: those tensors, of which each has a portion of its own.
        counts: how many odd values each has.
    """

    def __init__(self, portions: Sequence[Portion], counts: Any) -> None:
        self._portions, self._counts = portions, counts

    def passed(self) -> bool:
        """Whether it is done."""
        return bool(self._counts.passed())

    def clean(self) -> frozenset[int]:
        """The positions of the tensors without odd values, once it is done; only once."""
        found = zip(self._portions, self._counts.read())
        return frozenset(portion.positions[0] for portion, count in found if not count)


class Search:
    """Looks at the values of tensors before they are summed over the ranks of a topology."""

    def __init__(self, topology: Topology) -> None:
        kinds = ((dtype, compressed) for dtype in _MANTISSA for compressed in (False, True))
        self._limits = {kind: limits(*kind, topology) for kind in kinds}
        self._together: dict[int, _Together] = {}

    def begin(self, searched: Sequence[Portion], arrays: Sequence[Any]) -> GpuSearch | None:
        """Queue the search of the tensors on a GPU; None if there are none. Arguments as of ``odd_values``."""
        there = [portion for portion in searched if device.device_of(arrays[portion.positions[0]]) == "gpu"]
        if not there:
            return None
        from .data import cuda_sums

        return GpuSearch(there, cuda_sums.Counts([
            (arrays[one.positions[0]], one.dtype, self._limits[one.dtype, one.compressed].large) for one in there
        ]))  # fmt: skip

    def odd_values(
        self, searched: Sequence[Portion], arrays: Sequence[Any], begun: GpuSearch | None = None
    ) -> dict[str, str]:
        """What is odd about the values of a call's tensors, by their positions; see ``Findings``.

        Args:
            searched: what is searched at once; arrays: the flat arrays of the call, by position.
            begun: the search of those on a GPU, which is done.
        """
        found, clean = {}, begun.clean() if begun is not None else frozenset()
        for portion in self._left(searched, arrays):
            if portion.positions[0] in clean:
                continue
            its = self._limits[portion.dtype, portion.compressed]
            for position in _suspects(portion, its, arrays):
                text = _oddity(arrays[position], portion, its)
                if text is not None:
                    found[str(position)] = text
        return found

    def all_clean(self, searched: Sequence[Sequence[Portion]], arrays: Sequence[Any]) -> bool:
        """Whether one thread has searched an array of each of several calls, and found nothing; False: perhaps not.

        Args:
            searched: of each call; arrays: one of each.
        """
        sizes, least = list[int](), list[int]()
        for portions_of, x in zip(searched, arrays):
            if len(portions_of) != 1 or not portions_of[0].sizes or not runs_serial(x.size):
                return False
            sizes.append(x.size)
            least.append(self._limits[portions_of[0].dtype, portions_of[0].compressed].large)
        if len(sizes) < len(searched):
            return False
        return bool(magnitudes.all_in_range(addresses(arrays), np.array(sizes, np.int64), np.array(least, np.int64)))

    def is_clean(self, searched: Sequence[Portion], x: np.ndarray) -> bool:
        """Whether ``odd_values`` would find nothing in a call of one array, on the host and not empty; quicker."""
        if not searched:
            return True
        portion = searched[0]
        if not portion.sizes or not runs_serial(x.size):
            return not self.odd_values(searched, [x])
        least = self._limits[portion.dtype, portion.compressed].large
        return bool(magnitudes.in_range(device.begin_of(x), x.size, least))

    def common_limit(self, searched: Sequence[Portion]) -> tuple[int, bool]:
        """If all tensors of a call are float32 with one limit: its bits, and whether one thread searches; else 0.

        The limit is the same on all ranks; the number of threads need not be.
        """
        kinds = {(portion.dtype, portion.compressed) for portion in searched}
        if len(kinds) != 1 or not all(portion.sizes for portion in searched):
            return 0, False
        return self._limits[kinds.pop()].large, not self._known(searched).rest

    def _known(self, searched: Sequence[Portion]) -> _Together:
        known = self._together.get(id(searched))
        if known is None:
            if len(self._together) >= _KNOWN:
                self._together.clear()
            known = self._together[id(searched)] = self._joined(searched)
        return known

    def _left(self, searched: Sequence[Portion], arrays: Sequence[Any]) -> Sequence[Portion]:
        """The portions that are left when one compiled call has gone through all that one thread searches."""
        known = self._known(searched)
        if not known.positions:
            return searched
        places = addresses([arrays[position] for position in known.positions])
        return known.rest if magnitudes.all_in_range(places, known.sizes, known.least) else searched

    def _joined(self, searched: Sequence[Portion]) -> _Together:
        joined, rest = list[tuple[int, int, int]](), list[Portion]()
        for portion in searched:
            if not portion.sizes or not all(map(runs_serial, portion.sizes)):
                rest.append(portion)
                continue
            least = self._limits[portion.dtype, portion.compressed].large
            joined += [(position, size, least) for position, size in zip(portion.positions, portion.sizes)]
        columns = np.array(joined, np.int64).reshape(-1, 3)
        return _Together(searched, [one[0] for one in joined], columns[:, 1].copy(), columns[:, 2].copy(), rest)


def _suspects(portion: Portion, its: RangeLimits, arrays: Sequence[Any]) -> Sequence[int]:
    """Those that have to be searched by themselves: all if any of them has odd values, else none."""
    if len(portion.positions) == 1:
        return portion.positions
    joined = np.concatenate([arrays[position] for position in portion.positions])
    return portion.positions if reduction.count_from(joined, portion.dtype, its.large) else ()


def _oddity(array: Any, portion: Portion, its: RangeLimits) -> str | None:
    large = reduction.count_from(array, portion.dtype, its.large)
    if large == 0:
        return None
    infinite = reduction.count_from(array, portion.dtype, its.infinite)
    if infinite:
        return f"has {infinite} NaN or infinite value(s)"
    if portion.compressed:
        return f"has {large} value(s) of {its.most} or more, too large to be compressed and summed"
    return ""


def separated(found: Findings) -> tuple[Findings, frozenset[int]]:
    """The problems that forbid a sum, and the positions of the tensors whose values are only large on some rank."""
    bad = {rank: {at: text for at, text in of_rank.items() if text} for rank, of_rank in found.items()}
    large = frozenset(int(at) for of_rank in found.values() for at, text in of_rank.items() if not text)
    return {rank: of_rank for rank, of_rank in bad.items() if of_rank}, large


# --- large values on their way ----------------------------------------------------------------------------------------


def scale(x: Any, exponent: int, dtype: str) -> None:
    """``x *= 2**exponent`` for a flat array of any type; what leaves its range, by rounding, becomes its largest value.

    Rare, therefore simple: it allocates, and a GPU's values pass through the host.
    """
    if device.device_of(x) == "gpu":
        here = device.empty(x.size, x.dtype, "cpu")
        device.copy(here, x)
        scale(here, exponent, dtype)
        device.copy(x, here)
        return
    wide = x
    if x.dtype == np.uint16:
        wide = np.empty(x.size, np.float32)
        reduction.convert(wide, x, dtype)
    with np.errstate(over="ignore", under="ignore"):
        np.ldexp(wide, exponent, out=wide)
    np.clip(wide, -_LARGEST[dtype], _LARGEST[dtype], out=wide)
    if wide is not x:
        reduction.convert(x, wide, dtype)
