"""``bench compressors``: what each method costs on one device, beside the least time that its memory traffic allows.

In every repetition a plain copy, every method and every peer's operation take turns, so that a noisy moment meets them
all. The bound of a method is the least number of bytes that it must read and write (``Compressor.encode_traffic``,
``decode_traffic``) over the bandwidth of that copy; the fraction is the bound's time over the measured one. At its turn
each runs a few times in a row and the quickest counts, the copy as well: so all find their arrays in the same caches.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .output import check_writable, parse_sizes, progress, show, write_rows

_IN_A_ROW = 5
"""Calls at each turn. It takes about four until a cache of the last level has forgotten the method before."""

_ERROR_SIZE = 1 << 22
"""The error is measured on at most this many elements: it hardly depends on more."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: a compressor's spelling, or ``copy``, or a peer's operation such as ``torch topk 1%``.
        device: ``cpu`` or ``cuda``; threads: those that the kernels may use (0 on a GPU).
        n: float32 elements.
        feedback: whether the encode that was timed has a residual.
        encode_s, decode_s: median seconds of encode and of decode_add; 0 where a peer has no such operation.
        encode_bound_fraction, decode_bound_fraction: the share of the memory bound that is reached; None for peers.
        payload_bytes: size of the payload.
        vnmse: measured ``‖x - C(x)‖² / ‖x‖²`` on normal values, without feedback.
        vnmse_expected: what analysis says of it; None where it is not known.
        launch_s: the same encode of one element: the cost of the call itself.
    """

    method: str
    device: str
    threads: int
    n: int
    feedback: bool
    encode_s: float
    decode_s: float
    encode_bound_fraction: float | None
    decode_bound_fraction: float | None
    payload_bytes: int
    vnmse: float | None
    vnmse_expected: float | None
    launch_s: float | None = None


@dataclass(frozen=True)
class _Contestant:
    """Something to time: encode and decode_add (or None) once, and the row that its times complete."""

    encode: Callable[[], None]
    decode: Callable[[], None] | None
    row: Callable[[float, float, float], Row]
    after: Callable[[], None] = lambda: None


def main(
    sizes: str | None = None,
    device: str = "cpu",
    methods: str = "all",
    threads: str = "1",
    repeats: int = 15,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table, and write JSON if asked.

    Args:
        sizes: comma list of sizes of the float32 array; default 16MiB on the CPU, 400 MB on a GPU.
        device: ``cpu`` or ``cuda``.
        methods: comma list of spellings; ``all`` for every method with its defaults, ``variants`` for those and the
            examples that each method names.
        threads: comma list of numbers of CPU threads to measure with.
        repeats: timed repetitions.
        json: file for the result.

    Raises:
        ConfigError: an argument does not fit, or there is no GPU.
    """
    check_writable(json)
    specs = _specs(methods)
    lengths = [nbytes // 4 for nbytes in parse_sizes(sizes or ("400000000B" if device == "cuda" else "16MiB"))]
    counts = _thread_counts(threads) if device == "cpu" else [0]
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}; expected cpu or cuda")
    if device == "cuda":
        _require_gpu()
    rows: list[Row] = []
    with progress("bench compressors", len(lengths) * len(counts) * repeats) as tick:
        for n in lengths:
            for count in counts:
                rows += _measure(_Stage(device, count, n), specs, repeats, tick)
    _print(rows)
    if json is not None:
        write_rows(json, rows)
    return rows


def _specs(methods: str) -> list[str]:
    from .. import compressors

    if methods == "all":
        return list(compressors.names())
    if methods == "variants":
        return [spec for name in compressors.names() for spec in (name, *type(compressors.get(name)).examples)]
    return [spec for spec in compressors.spellings(methods) if spec != "none"]


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


def _require_gpu() -> None:
    from numba import cuda

    if not cuda.is_available():
        raise ConfigError("--device cuda: numba finds no GPU here; espresso-mpi doctor says more")


# --- where it is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """A device with a number of threads, and arrays of n elements on it."""

    device: str
    threads: int
    n: int

    def array(self, values: np.ndarray) -> Any:
        """A copy of the values on the device."""
        if self.device == "cpu":
            return values.copy()
        from numba import cuda

        return cuda.to_device(values)

    def seconds(self, work: Callable[[], None]) -> float:
        """How long something takes, on a GPU until it has finished."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            from ..device import synchronize

            synchronize()

    @contextmanager
    def set(self) -> Iterator[None]:
        """Let numba (and torch, for its rows) use this number of threads inside the with-block."""
        if self.device != "cpu":
            yield
            return
        import numba

        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


def _measure(stage: _Stage, specs: Sequence[str], repeats: int, tick: Callable[[], None]) -> list[Row]:
    x = np.random.default_rng(stage.n).standard_normal(stage.n).astype(np.float32)
    with stage.set():
        arrays = stage.array(x), stage.array(np.zeros(stage.n, np.float32))
        contestants = [_copy(stage, x), *(_ours(stage, x, *arrays, spec) for spec in specs), *_peers(stage, x)]
        for contestant in contestants:  # compiles, and takes the memory that is kept
            _repetition(stage, contestant)
        times = []
        for _ in range(repeats):
            times.append([_repetition(stage, contestant) for contestant in contestants])
            tick()
    median = np.median(np.array(times), axis=0)
    per_byte = median[0, 0] / (8 * stage.n)  # the copy reads and writes 4 bytes an element
    return [c.row(float(encode), float(decode), per_byte) for c, (encode, decode) in zip(contestants, median)]


def _repetition(stage: _Stage, contestant: _Contestant) -> tuple[float, float]:
    """Seconds of encode and decode: of each the quickest of a few calls in a row, which has the caches to itself."""
    encode = []
    for _ in range(_IN_A_ROW):
        encode.append(stage.seconds(contestant.encode))
        contestant.after()
    if contestant.decode is None:
        return min(encode), 0.0
    return min(encode), min(stage.seconds(contestant.decode) for _ in range(_IN_A_ROW))


def _copy(stage: _Stage, x: np.ndarray) -> _Contestant:
    from ..device import copy

    source, target = stage.array(x), stage.array(x)

    def row(encode: float, decode: float, per_byte: float) -> Row:
        return Row("copy", stage.device, stage.threads, stage.n, False, encode, 0.0, 1.0, None, x.nbytes, 0.0, 0.0)

    return _Contestant(lambda: copy(target, source), None, row)


def _ours(stage: _Stage, values: np.ndarray, x: Any, out: Any, spec: str) -> _Contestant:
    from ..compressors import Context, get
    from ..feedback import Feedback

    n, compressor = stage.n, get(spec).at(None)
    feedback = Feedback().resolved(compressor, n).kind != "none"
    error, launch = _error(stage, values[:_ERROR_SIZE], compressor), _launch(stage, compressor)
    residual = stage.array(np.zeros(n, np.float32)) if feedback else None
    payload = stage.array(np.zeros(compressor.nbytes(n), np.uint8))
    context = Context(key=1, shared=2)

    def encode() -> None:
        context.step += 1
        context.key, context.shared = context.key + 1, context.shared + 1
        compressor.encode(x, payload, residual, context)

    def row(encode_s: float, decode_s: float, per_byte: float) -> Row:
        traffic = compressor.encode_traffic(n) - (0 if feedback else 8 * n)
        return Row(
            spec, stage.device, stage.threads, n, feedback, encode_s, decode_s, traffic * per_byte / encode_s,
            compressor.decode_traffic(n) * per_byte / decode_s, compressor.nbytes(n), error,
            compressor.gaussian_error(min(n, _ERROR_SIZE)), launch,
        )  # fmt: skip

    return _Contestant(
        encode,
        lambda: compressor.decode_add(payload, out, context),
        row,
        lambda: compressor.learn(payload, n, context),
    )


def _error(stage: _Stage, values: np.ndarray, compressor: Any) -> float:
    """The mean square error of a first encode, relative to the values."""
    from ..compressors import Context
    from ..device import copy

    out = stage.array(np.zeros(values.size, np.float32))
    payload = stage.array(np.zeros(compressor.nbytes(values.size), np.uint8))
    compressor.encode(stage.array(values), payload, None, Context(key=7, shared=8))
    compressor.decode(payload, out)
    seen = np.empty_like(values)
    copy(seen, out)
    wide = values.astype(np.float64)
    return float(np.sum((wide - seen) ** 2) / np.sum(wide**2))


def _launch(stage: _Stage, compressor: Any) -> float:
    """Seconds of an encode of one element."""
    from ..compressors import Context

    x, context = stage.array(np.ones(1, np.float32)), Context()
    payload = stage.array(np.zeros(compressor.nbytes(1), np.uint8))
    times = [stage.seconds(lambda: compressor.encode(x, payload, None, context)) for _ in range(20)]
    return float(np.median(times[1:]))


# --- what others offer for the same -----------------------------------------------------------------------------------


def _peers(stage: _Stage, values: np.ndarray) -> list[_Contestant]:
    """torch's casts, top-k and quantisation, if it is installed: on the same values, with as many threads."""
    try:
        import torch
    except ImportError:
        return []
    if stage.device == "cuda" and not torch.cuda.is_available():
        return []
    torch.set_num_threads(max(1, stage.threads))
    x = torch.tensor(values, device=stage.device)
    out = torch.zeros_like(x)
    k = max(1, stage.n // 100)
    scale = float(np.abs(values).max()) / 127

    def half(kind: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        return lambda: x.to(kind), lambda payload: out.add_(payload)

    def largest() -> Any:
        indices = x.abs().topk(k, sorted=False).indices
        return indices, x[indices]

    def quantised() -> Any:
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # it is to go some day
        return torch.quantize_per_tensor(x, scale, 0, torch.qint8)

    operations: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {
        "torch half": (2 * stage.n, *half(torch.float16)),
        "torch bfloat16": (2 * stage.n, *half(torch.bfloat16)),
        "torch topk 1%": (12 * k, largest, lambda payload: out.index_add_(0, *payload)),
    }
    if stage.device == "cpu":
        operations["torch qint8"] = (stage.n, quantised, lambda payload: out.add_(payload.dequantize()))
    return [_peer(stage, name, *operation) for name, operation in operations.items()]


def _peer(
    stage: _Stage, name: str, nbytes: int, encode: Callable[[], Any], decode: Callable[[Any], Any]
) -> _Contestant:
    payload = encode()

    def row(encode_s: float, decode_s: float, per_byte: float) -> Row:
        return Row(
            name, stage.device, stage.threads, stage.n, False, encode_s, decode_s, None, None, nbytes, None, None
        )

    def discard(operation: Callable[..., Any], *args: Any) -> None:
        operation(*args)

    return _Contestant(partial(discard, encode), partial(discard, decode, payload), row)


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row]) -> None:
    header, lines = table(rows)
    show("encode (with feedback where it is allowed) and decode_add of normal values", header, lines)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heading and lines of the table that people read."""
    header = ["method", "threads", "n", "encode GB/s", "of bound", "decode GB/s", "of bound", "bits/element", "vNMSE",
              "expected", "call µs"]  # fmt: skip
    return header, [_line(row) for row in rows]


def _line(row: Row) -> list[str]:
    def rate(seconds: float) -> str:
        return f"{4 * row.n / seconds / 1e9:.2f}" if seconds else ""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def error(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    name = row.method if row.feedback or row.vnmse_expected is None else f"{row.method} (no feedback)"
    return [
        name if row.method != "copy" else "copy", str(row.threads or row.device), f"{row.n:,}", rate(row.encode_s),
        share(row.encode_bound_fraction), rate(row.decode_s), share(row.decode_bound_fraction),
        f"{8 * row.payload_bytes / row.n:.2f}", error(row.vnmse), error(row.vnmse_expected),
        "" if row.launch_s is None else f"{row.launch_s * 1e6:.0f}",
    ]  # fmt: skip
