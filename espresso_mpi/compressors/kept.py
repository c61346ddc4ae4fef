"""What the methods share that send the elements of largest magnitude: how the elements chosen are stored.

With ``values=fp32`` the payload holds their indices and values as they are, 64 bits for each. Otherwise positions are
coded (``kernels.cpu.positions``: about log₂(1/ratio) + 2 bits), and the values by the method of that name with its
defaults, in order of index: 4.25 bits with ``int4``, 1.02 with ``onebit``. What that rounds off stays in the residual.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .base import Compressor
from .by_address import Entry, KernelCall
from .checks import check_choice, check_number
from .context import Context
from .kernels.cpu import kept_entries, positions, samples, sparse
from .optional import without_kernel
from .registry import get

VALUES = ("fp32", "fp16", "int8", "int4", "int2", "onebit")
"""How values may be stored."""


class Choice(NamedTuple):
    """How a kernel by address chooses elements.

    Attributes:
        entry: the kernel.
        numbers: what it is told of the choice.
        scratch: bytes of scratch memory that it needs for it.
        state: as of ``KernelCall``.
        prefix: numbers before all others, for a kernel that needs the context.
    """

    entry: Entry
    numbers: tuple[float, ...]
    scratch: int = 0
    state: str = ""
    prefix: tuple[float, ...] = ()


class Rounded(Compressor):
    """A method that sends some values, which may be rounded by another method."""

    values: str
    counted: ClassVar[bool] = False
    """Whether plain payloads begin with the number of elements that they hold: a uint32 and four zeros."""

    @abstractmethod
    def count(self, n: int) -> int:
        """How many values are sent of n elements, or at most."""

    def _where(self, n: int) -> positions.Layout:
        """How their positions are coded."""
        return positions.layout(n, self.count(n))

    def _form(self, n: int) -> tuple[tuple[float, ...], tuple[KernelCall, ...]]:
        """What kernels by address are told of the payload, and which ones they call."""
        k, where = self.count(n), self._where(n)
        if self.values == "fp32":
            return (k, self.counted, 0, *where), ()
        calls = tuple(filter(None, (self._coder.encoder(k), self._coder.decoder(k))))
        return (k, self.counted, 1 + len(calls[0].parameters), *where), calls

    def _check_values(self) -> None:
        """Raise ConfigError unless there is a method of that name."""
        check_choice(self.name, "values", self.values, VALUES)

    def _contraction_of(self, share: float, count: int) -> float:
        """The δ of a choice of at least this share of ``‖x‖²``, in ``count`` values, which are then rounded."""
        return share if self.values == "fp32" else share * self._coder.contraction(count)

    def _gaussian_error(self, n: int, lost: float, share: float) -> float:
        """With the rounding of values, which are the largest ``share`` of the elements; the others lose ``lost``."""
        if self.values == "fp32":
            return lost
        return lost + (1 - lost) * _tail_error(self.values, share, max(1, round(share * n)))

    @property
    def _coder(self) -> Compressor:
        return _method(self.values)

    def _decoded(self, payload: Any, where: positions.Layout, k: int, context: Context) -> Any:
        """The k values that a payload with coded positions holds, on its device."""
        seen = context.scratch("kept-seen", k, np.float32, payload)
        self._coder.decode(payload[where.nbytes :], seen, context)
        return seen


class Kept(Rounded):
    """What the methods have in common.

    A payload without ``values=fp32`` holds the positions, as ``positions.Layout`` says, zeros up to a multiple of
    16 bytes, and then the payload of the values. If m < k elements go, the values end with k - m zeros.
    """

    ratio: float

    def _check_kept(self) -> None:
        """Raise ConfigError unless the parameters that all have are valid."""
        check_number(self.name, "ratio", self.ratio, 0, 1, above=True)
        self._check_values()

    def _check_values(self) -> None:
        super()._check_values()
        object.__setattr__(self, "sparse", self.values == "fp32")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in ("_choose_cpu", "_momentum_cpu"):
            without_kernel(cls, hook, "_choice", Kept._choice)

    # --- sizes and promises ---

    def count(self, n: int) -> int:
        return sparse.count(n, self.ratio)

    def nbytes(self, n: int) -> int:
        k = self.count(n)
        if not n or self.values == "fp32":
            return self._plain_bytes(k) if n else 0
        return self._where(n).nbytes + self._coder.nbytes(k)

    def decode_traffic(self, n: int) -> int:
        return sparse.scattered_traffic(n, self.count(n)) + self.nbytes(n)

    def _contraction(self, n: int, least: int) -> float:
        """The δ of a choice of at least so many of the largest, whose values are then rounded."""
        return self._contraction_of(least / n if n else 1.0, self.count(n))

    # --- the work ---

    @abstractmethod
    def _choose_cpu(self, x: np.ndarray, plain: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        """Encode into a plain payload."""

    @abstractmethod
    def _choose_cuda(self, x: Any, plain: Any, residual: Any, context: Context) -> None:
        """As ``_choose_cpu``."""

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        if self.values == "fp32":
            self._choose_cpu(x, payload, residual, context)
            return
        plain = self._room(x, context)
        self._choose_cpu(x, plain, residual, context)
        head, indices, sent = self._split(plain)
        count = indices.size if head is None else int(head[0])
        where = self._where(x.size)
        positions.write(indices, count, *where.split(payload), where.low)
        self._coder.encode(sent, payload[where.nbytes :], None, context)
        if residual is not None:
            seen = self._decoded(payload, where, sent.size, context)
            positions.settle(indices[:count], sent, seen, residual)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        if self.values == "fp32":
            head, indices, sent = self._split(payload)
            m = indices.size if head is None else min(int(head[0]), indices.size)
            sparse.decode(out, indices[:m], sent[:m], add)
            return
        k = self.count(out.size)
        where = self._where(out.size)
        seen = self._decoded(payload, where, k, context)
        positions.scatter(*where.split(payload), where.low, seen, out, add, context)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        if self.values == "fp32":
            self._choose_cuda(x, payload, residual, context)
            return
        from .kernels.cuda import positions as cuda_positions

        plain = self._room(x, context)
        self._choose_cuda(x, plain, residual, context)
        head, indices, sent = self._split(plain)
        where = self._where(x.size)
        cuda_positions.write(indices, head, *where.split(payload), where.low)
        self._coder.encode(sent, payload[where.nbytes :], None, context)
        if residual is not None:
            seen = self._decoded(payload, where, sent.size, context)
            cuda_positions.settle(indices, head, sent, seen, residual)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        if self.values == "fp32":
            from .kernels.cuda import topk as cuda_topk

            head, indices, sent = self._split(payload)
            cuda_topk.scatter(indices if head is None else head, indices, sent, out, head is not None, add)
            return
        from .kernels.cuda import positions as cuda_positions

        k = self.count(out.size)
        where = self._where(out.size)
        seen = self._decoded(payload, where, k, context)
        cuda_positions.scatter(*where.split(payload), where.low, seen, out, add, context)

    # --- by address ---

    def encoder(self, n: int) -> KernelCall | None:
        choice = self._choice(n) if n else None
        if choice is None:
            return None
        form, calls = self._form(n)
        scratch = choice.scratch + (kept_entries.scratch_to_store(self.count(n)) if calls else 0)
        numbers, needs = (*choice.prefix, *form, *choice.numbers), bool(choice.prefix)
        return KernelCall(
            choice.entry, numbers, calls=calls, state=choice.state, scratch=scratch, needs_context=needs
        )  # fmt: skip

    def decoder(self, n: int) -> KernelCall | None:
        if not n:
            return None
        form, calls = self._form(n)
        scratch = kept_entries.scratch_to_decode(self.count(n), int(form[kept_entries.HIGHS])) if calls else 0
        return KernelCall(kept_entries.decode_at, form, calls=calls, scratch=scratch)

    def _choice(self, n: int) -> Choice | None:
        """How a kernel by address chooses among n elements; None: there is none."""
        return None

    # --- plain payloads ---

    def _plain_bytes(self, k: int) -> int:
        return 8 * self.counted + 8 * k

    def _room(self, x: Any, context: Context) -> Any:
        return context.scratch("kept-plain", self._plain_bytes(self.count(x.size)), np.uint8, x)

    def _split(self, plain: Any) -> tuple[Any, Any, Any]:
        """The parts as (uint32 count and zero, or None; uint32 indices; float32 values) views."""
        if self.counted:
            return sparse.split(plain)
        middle = plain.size // 2
        return None, plain[:middle].view(np.uint32), plain[middle:].view(np.float32)


class Sampled(Kept):
    """Methods whose choice begins with a sample."""

    @abstractmethod
    def _quota(self, n: int) -> sparse.Quota:
        """How many elements go, at most and at least."""

    @abstractmethod
    def _sample(self, n: int) -> samples.Sample:
        """The sample."""

    def _key(self) -> int:
        """The bits of the threshold, as float32; 0: it comes from the sample."""
        return 0

    def _momentum_cpu(self, x: np.ndarray, context: Context) -> sparse.Momentum | None:
        """What the values enter before the choice; None: nothing."""
        return None

    def _choice(self, n: int) -> Choice | None:
        return self._sampled_choice(n)

    def _sampled_choice(self, n: int, decay: float = 0.0, state: str = "") -> Choice:
        """By ``encode_at``; with a momentum of this decay and name, if one is given."""
        quota, sample = self._quota(n), self._sample(n)
        numbers = kept_entries.choice_of(n, quota, self._key(), sample, decay)
        return Choice(kept_entries.encode_at, numbers, kept_entries.scratch_to_choose(n, quota, sample), state)

    def _choose_cpu(self, x: np.ndarray, plain: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        momentum, n = self._momentum_cpu(x, context), x.size
        head, indices, sent = self._split(plain)
        choice = self._quota(n), self._key(), self._sample(n)
        count = sparse.encode(x, residual, momentum, *choice, indices, sent, context)
        if head is not None:
            head[0], head[1] = count, 0


class Counted(Sampled):
    """Methods that send what reaches a threshold, k elements at the most.

    Payload with ``values=fp32``: a uint64 m, k uint32 indices in rising order, k float32 values. The slots beyond m are
    zero. The threshold comes from a sample, unless ``_key`` gives it.
    """

    counted = True

    def _sample(self, n: int) -> samples.Sample:
        return samples.deciding(n, self.count(n))

    def _momentum_cuda(self, x: Any, context: Context) -> Any:
        """As ``_momentum_cpu``."""
        return None

    def contraction(self, n: int) -> float:
        return self._contraction(n, self._quota(n).least) if n else 1.0

    def gaussian_error(self, n: int) -> float | None:
        if not n:
            return None
        return self._gaussian_error(n, sparse.sampled_error(n, self.count(n)), self.count(n) / n)

    def _choose_cuda(self, x: Any, plain: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import sparse as cuda_sparse

        momentum, n = self._momentum_cuda(x, context), x.size
        cuda_sparse.encode(x, residual, momentum, self._quota(n), self._key(), self._sample(n).rank, plain, context)


@lru_cache
def _method(values: str) -> Compressor:
    return get(values)


@lru_cache
def _tail_error(values: str, share: float, count: int) -> float:
    """What ``count`` values lose of the largest ``share`` of normal values: the mean over 2¹⁴ of its quantiles."""
    quantiles = (np.random.default_rng(0).permutation(1 << 14) + 0.5) / (1 << 14)
    magnitudes = [-NormalDist().inv_cdf(share / 2 * quantile) for quantile in quantiles]
    x = (np.array(magnitudes) * np.resize([1, -1], len(magnitudes))).astype(np.float32)
    coder, seen, size = _method(values), np.empty_like(x), min(count, x.size)
    payload, used = np.empty(coder.nbytes(size), np.uint8), size * min(512, x.size // size)
    for start in range(0, used, size):
        coder.encode(x[start : start + size], payload)
        coder.decode(payload, seen[start : start + size])
    x, seen = x[:used].astype(np.float64), seen[:used]
    return float(np.sum((x - seen) ** 2) / np.sum(x**2))
