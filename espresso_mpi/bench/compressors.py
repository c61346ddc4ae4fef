"""``bench compressors``: what each method costs on one device, beside the least time that its memory traffic allows.

In every repetition plain kernels, every method and every peer's operation take turns, so that a noisy moment meets them
all. The bound of a method is the least number of bytes that it must read and write (``Compressor.encode_traffic``,
``decode_traffic``) over the best rate at which any plain kernel moved bytes (``memory``; on a GPU a copy); the fraction
is the bound's time over the method's best. Arrays of four times the last-level cache are measured with cold caches;
smaller ones may be in it, as they are after a few calls in a row, and have no such bound.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import device
from ..arrays.gpu_times import Stopwatch
from ..errors import ConfigError
from ..files.output import parse_sizes
from . import memory
from .compressor_tables import COLD, TABLE, Row, by_size
from .defaults import Compressors as Defaults
from .harness.suite import Suite
from .memory import last_level_cache

_CACHED = 16
"""The smaller array that is measured by default has this part of the last-level cache."""

_WARM_CALLS = 4
"""Calls in a row before one is timed, until a cache of the last level has forgotten the method before."""

_GPU_CALLS = 4
"""Calls in a row that are timed on a GPU."""

_ERROR_SIZE = 1 << 22
"""The error is measured on at most this many elements: it hardly depends on more."""


@dataclass(frozen=True)
class _TimedCodec:
    """Something to time.

    Attributes:
        encode: does it once. decode: decode_add once; None where there is none.
        row: what is known of it before it is timed.
        traffic: bytes that encode and decode must read and write; 0: not known, or not to be compared.
        before: before each turn; after: after each encode. Both outside the clock.
    """

    encode: Callable[[], object]
    decode: Callable[[], object] | None
    row: Row
    traffic: tuple[int, int] = (0, 0)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def main(
    sizes: str | None = None,
    device: str = Defaults.device,
    methods: str = Defaults.methods,
    threads: str = Defaults.threads,
    repeats: int = Defaults.repeats,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table, and write JSON if asked.

    Args:
        sizes: comma list of sizes of the float32 array; default on the CPU: four times its last-level cache, and a
            sixteenth of it; 400 MB on a GPU.
        device: ``cpu`` or ``cuda``.
        methods: comma list of specs; ``all`` for every method with its defaults, ``variants`` for those and the
            examples that each method names.
        threads: comma list of numbers of CPU threads to measure with.
        repeats: timed repetitions.
        json: file for the result.

    Raises:
        ConfigError: an argument does not fit, or there is no GPU.
    """
    run = Suite("compressors", json=json)
    specs = _specs(methods)
    lengths = [nbytes // 4 for nbytes in parse_sizes(sizes or _usual(device))]
    counts = _thread_counts(threads) if device == "cpu" else [0]
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}; expected cpu or cuda")
    if device == "cuda":
        require_gpu("--device cuda")
    rows: list[Row] = []
    with run.progress(len(lengths) * len(counts) * repeats) as tick:
        for n in lengths:
            for count in counts:
                rows += _measure(_Setup(device, count, n), specs, repeats, tick)
    _print(rows)
    run.write(rows, cache=last_level_cache())
    return rows


def _usual(device: str) -> str:
    """The sizes that are measured by default."""
    cache = last_level_cache()
    return "400000000B" if device == "cuda" else f"{COLD * cache}B,{cache // _CACHED}B"


def variants() -> list[str]:
    """Every method with its defaults, and the examples that it names."""
    from .. import compressors

    return [spec for name in compressors.names() for spec in (name, *type(compressors.get(name)).examples)]


def _specs(methods: str) -> list[str]:
    from .. import compressors

    if methods == "all":
        return list(compressors.names())
    if methods == "variants":
        return variants()
    return [spec for spec in compressors.read_specs(methods) if spec != "none"]


def _thread_counts(text: str) -> list[int]:
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= most for count in counts):
        raise ConfigError(f"--threads {text}; expected numbers from 1 to {most}, such as 1,{most}")
    return counts


def require_gpu(asked_by: str) -> None:
    """Raise ConfigError if there is no GPU for what asks for one."""
    from numba import cuda

    if not cuda.is_available():
        raise ConfigError(f"{asked_by}: numba finds no GPU here; espresso-mpi doctor says more")


# --- where it is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    """A device with a number of threads, and arrays of n elements on it."""

    device: str
    threads: int
    n: int

    def array(self, values: np.ndarray) -> Any:
        """A copy of the values on the device."""
        if self.device == "cpu":
            return values.copy()
        from numba import cuda

        return cuda.to_device(values, stream=device.stream())

    def seconds(self, work: Callable[[], object]) -> float:
        """How long something takes, on a GPU from kernel to kernel."""
        if self.device == "cuda":
            return _gpu_seconds(work)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    @property
    def cold(self) -> bool:
        """Whether caches are emptied before each call: for arrays that do not fit into them."""
        return self.device != "cpu" or 4 * self.n >= COLD * last_level_cache()

    @cached_property
    def _filler(self) -> np.ndarray:
        return np.ones(2 * last_level_cache(), np.uint8)

    def timed(self, work: Callable[[], object], after: Callable[[], None] = lambda: None) -> float:
        """Seconds of a call with cold caches, or of the last of several where the array may be in them."""
        for _ in range(0 if self.cold else _WARM_CALLS):
            work()
            after()
        if self.cold and self.device == "cpu":
            np.bitwise_xor(self._filler, 1, out=self._filler)
        seconds = self.seconds(work)
        after()
        return seconds

    @contextmanager
    def set(self) -> Iterator[None]:
        """Let numba (and torch, for its rows) use these threads, or a stream of a GPU, inside the with-block."""
        if self.device != "cpu":
            with device.leaving_stream():
                device.enter_stream(device.OwnStream())  # as in a session, where what was cut is counted without a wait
                yield
            return
        import numba

        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


def _gpu_seconds(work: Callable[[], object]) -> float:
    """The mean time of several calls in a row, by events: the host queues a call while the GPU works on the former."""
    watch = Stopwatch()
    work()
    watch.start()
    for _ in range(_GPU_CALLS):
        work()
    watch.stop()
    return watch.seconds() / _GPU_CALLS


def _measure(setup: _Setup, specs: Sequence[str], repeats: int, tick: Callable[[], None]) -> list[Row]:
    x = np.random.default_rng(setup.n).standard_normal(setup.n, np.float32)
    with setup.set():
        arrays = _Arrays(*(setup.array(values) for values in (x, np.zeros_like(x), np.zeros_like(x), np.zeros_like(x))))
        plain = _plain(setup, arrays)
        methods = [*plain, *(_ours(setup, x, arrays, spec) for spec in specs), *_peers(setup, x)]
        for codec in methods:  # compiles, and takes the memory that is kept
            _turn(setup, codec)
        turns = []
        for _ in range(repeats):
            turns.append([_turn(setup, codec) for codec in methods])
            tick()
    times = np.array(turns)
    median, best = np.median(times, axis=0), times.min(axis=0)
    rate = max(c.traffic[0] / seconds for c, (seconds, _) in zip(plain, best))
    return [_row(setup, c, m, b, rate) for c, m, b in zip(methods, median, best)]


def _turn(setup: _Setup, codec: _TimedCodec) -> tuple[float, float]:
    """Seconds of encode and decode."""
    codec.before()
    encode = setup.timed(codec.encode, codec.after)
    return encode, 0.0 if codec.decode is None else setup.timed(codec.decode)


def _row(setup: _Setup, c: _TimedCodec, median: np.ndarray, best: np.ndarray, rate: float) -> Row:
    """A codec's row with its times, and the shares of its bound at a rate in bytes per second."""
    shares = [
        float(traffic / rate / seconds) if setup.cold and traffic and seconds else None
        for traffic, seconds in zip(c.traffic, best)
    ]
    return replace(
        c.row, encode_s=float(median[0]), decode_s=float(median[1]), encode_best_s=float(best[0]),
        decode_best_s=float(best[1]), encode_bound_fraction=shares[0], decode_bound_fraction=shares[1],
    )  # fmt: skip


@dataclass(frozen=True)
class _Arrays:
    """What all methods share, on the device: the values, what is added to, the residual, and zeros to reset it."""

    x: Any
    out: Any
    residual: Any
    zeros: Any

    def reset(self) -> None:
        """Nothing has been kept back yet."""
        device.copy(self.residual, self.zeros)


def _bare(setup: _Setup, name: str, nbytes: int = 0) -> Row:
    """A row without times and errors."""
    return Row(name, setup.device, setup.threads, setup.n, False, 0.0, 0.0, None, None, nbytes, None, None)


def _plain(setup: _Setup, arrays: _Arrays) -> list[_TimedCodec]:
    """What moves bytes and does nothing else."""
    n, x, out, residual = setup.n, arrays.x, arrays.out, arrays.residual
    kernels: dict[str, tuple[int, Callable[[], object]]] = {"copy": (8, lambda: device.copy(out, x))}
    if setup.device == "cpu":
        bits = x.view(np.uint32)
        kernels |= {
            "read": (4, lambda: memory.read(bits)),
            "update": (8, lambda: memory.update(out)),
            "accumulate": (12, lambda: memory.accumulate(residual, x)),
        }
    return [
        _TimedCodec(work, None, replace(_bare(setup, name, 4 * n), vnmse=0.0, vnmse_expected=0.0), (moved * n, 0))
        for name, (moved, work) in kernels.items()
    ]


def _ours(setup: _Setup, values: np.ndarray, arrays: _Arrays, spec: str) -> _TimedCodec:
    from ..compressors import Context, get
    from ..feedback import Feedback

    n, compressor = setup.n, get(spec).at(None)
    feedback = Feedback().resolved(compressor, n).kind != "none"
    residual = arrays.residual if feedback else None
    payload = setup.array(np.zeros(compressor.nbytes(n), np.uint8))
    context = Context(key=1, shared=2)

    def encode() -> None:
        context.step += 1
        context.key, context.shared = context.key + 1, context.shared + 1
        compressor.encode(arrays.x, payload, residual, context)

    def before() -> None:
        arrays.reset()
        if feedback:
            encode()  # so that there is a residual
            update()

    def update() -> None:
        compressor.update_from_aggregate(payload, n, context)

    row = replace(
        _bare(setup, spec, compressor.nbytes(n)), feedback=feedback, launch_s=_launch(setup, compressor),
        vnmse=_error(setup, values[:_ERROR_SIZE], compressor),
        vnmse_expected=compressor.gaussian_error(min(n, _ERROR_SIZE)),
    )  # fmt: skip
    traffic = compressor.encode_traffic(n) - (0 if feedback else 8 * n), compressor.decode_traffic(n)
    return _TimedCodec(
        encode, lambda: compressor.decode_add(payload, arrays.out, context), row, traffic, before, update
    )


def _error(setup: _Setup, values: np.ndarray, compressor: Any) -> float:
    """The mean square error of a first encode, relative to the values."""
    from ..compressors import Context

    out = setup.array(np.zeros(values.size, np.float32))
    payload = setup.array(np.zeros(compressor.nbytes(values.size), np.uint8))
    compressor.encode(setup.array(values), payload, None, Context(key=7, shared=8))
    compressor.decode(payload, out)
    seen = np.empty_like(values)
    device.copy(seen, out)
    wide = values.astype(np.float64)
    return float(np.sum((wide - seen) ** 2) / np.sum(wide**2))


def _launch(setup: _Setup, compressor: Any) -> float:
    """Seconds of an encode of one element."""
    from ..compressors import Context

    x, context = setup.array(np.ones(1, np.float32)), Context()
    payload = setup.array(np.zeros(compressor.nbytes(1), np.uint8))
    times = [setup.seconds(lambda: compressor.encode(x, payload, None, context)) for _ in range(20)]
    return float(np.median(times[1:]))


# --- what others offer for the same -----------------------------------------------------------------------------------


def _peers(setup: _Setup, values: np.ndarray) -> list[_TimedCodec]:
    """torch's casts, top-k and quantisation, if it is installed: on the same values, with as many threads."""
    try:
        import torch
    except ImportError:
        return []
    if setup.device == "cuda" and not torch.cuda.is_available():
        return []
    torch.set_num_threads(max(1, setup.threads))
    x = torch.tensor(values, device=setup.device)
    out = torch.zeros_like(x)
    k = max(1, setup.n // 100)
    scale = float(np.abs(values).max()) / 127

    def half(kind: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        kept = torch.empty_like(
            x, dtype=kind
        )  # as ours: memory that is new in every call would cost more than the cast
        return lambda: kept.copy_(x), lambda payload: out.add_(payload)

    def largest() -> Any:
        indices = x.abs().topk(k, sorted=False).indices
        return indices, x[indices]

    def quantised() -> Any:
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # it is to go some day
        return torch.quantize_per_tensor(x, scale, 0, torch.qint8)

    operations: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {
        "torch half": (2 * setup.n, *half(torch.float16)),
        "torch bfloat16": (2 * setup.n, *half(torch.bfloat16)),
        "torch topk 1%": (12 * k, largest, lambda payload: out.index_add_(0, *payload)),
    }
    if setup.device == "cpu":
        operations["torch qint8"] = (setup.n, quantised, lambda payload: out.add_(payload.dequantize()))
    return [_peer(setup, name, *operation) for name, operation in operations.items()]


def _beside_ours(work: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of torch's on the stream that our events are on."""
    import torch

    stream = torch.cuda.ExternalStream(device.launch_queue().address)

    def on_stream(*given: Any) -> Any:
        with torch.cuda.stream(stream):
            return work(*given)

    return on_stream


def _peer(
    setup: _Setup, name: str, nbytes: int, encode: Callable[[], Any], decode: Callable[[Any], Any]
) -> _TimedCodec:
    if setup.device == "cuda":
        encode, decode = _beside_ours(encode), _beside_ours(decode)
    return _TimedCodec(encode, partial(decode, encode()), _bare(setup, name, nbytes))


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row]) -> None:
    for title, own in by_size(rows, last_level_cache()).items():
        TABLE.show(f"encode (with feedback where it is allowed) and decode_add of normal values: {title}", own)
