"""What a cluster costs: the time of every encode, decode, collective and copy as a function of its size.

A ``Profile`` is measured on the cluster, or worked out from a description (``planner.cluster``), and kept as JSON.
Times are in seconds throughout, sizes in bytes, or in float32 elements where a codec is concerned.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.files import json_text, schema
from espresso_mpi.files.schema import MOST_RANKS, Count, Positive, Ranks, Relative, Seconds
from espresso_mpi.types import DeviceKind, Level, Op

KIND = schema.Kind("espresso_mpi profile", 1, "espresso-mpi profile")

MOST_BYTES = 1 << 26
"""Of a file: with all compressors on two devices it has 1 MB."""

Direction = Literal["encode", "decode"]
Share = Annotated[float, Meta(ge=0, le=1)]
Way = Literal["to_host", "to_gpu"]
Codec = tuple[Annotated[str, Meta(min_length=1)], DeviceKind, Direction]
Move = tuple[Op, Level, bool]

_LEAST_NOISE = 1e-3
"""Relative error that a median of times has at least, however small its spread: clocks change, neighbours come."""

_WORTH_OF_A_KNOT = 0.5
"""A further knot must lower the logarithm of the squared residual by this: the residual itself by 22 %."""

_STEEPEST = 1e6
"""Seconds a byte or element: 11 days. Steeper ones, times the largest size, could not be told from infinity."""

_FAR = 2.0**40
"""The second knot of ``Curve.line``: so far out that its value holds the slope to the last bit or two."""


class Sample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One measured point.

    Attributes:
        size: bytes, or float32 elements for codecs; at least 0.
        seconds: median over the repetitions, above 0.
        spread: interquartile range over the median.
        repeats: how many repetitions.

    Raises:
        ConfigError: a value is out of its range.
    """

    size: Count
    seconds: Seconds
    spread: Relative
    repeats: Positive

    def __post_init__(self) -> None:
        schema.check(self, "sample")
        if not self.seconds:
            raise ConfigError("sample: seconds: got 0; expected more; time several calls together if one is too short")

    @property
    def uncertainty(self) -> float:
        """Relative error of the median, about: the spread of so many repetitions."""
        return self.spread / math.sqrt(self.repeats)


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of size: continuous, piecewise linear, never falling, never below 0.

    Between knots it is linear; above the last one it goes on with the last piece, below the first one with the first
    piece, at least 0. One knot is a constant. Size 0 costs the start-up, not nothing.

    Attributes:
        knots: rising sizes, at least one.
        values: seconds there, never falling, at least 0.
        residual: root mean square of the samples' relative deviations from the curve.
        samples: what it was fitted to.

    Raises:
        ConfigError: the knots do not rise, a value falls, is below 0 or not finite.
    """

    knots: tuple[Seconds, ...]
    values: tuple[Seconds, ...]
    residual: Relative = 0.0
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        schema.check(self, "curve")
        if not self.knots or len(self.knots) != len(self.values):
            raise ConfigError(
                f"curve: got {len(self.knots)} knots and {len(self.values)} values; expected at least one, and as many "
                f"of both"
            )
        if any(b <= a for a, b in pairwise(self.knots)):
            raise ConfigError(f"curve: knots {self.knots}; expected sizes that rise; sort them, each once")
        if any(b < a for a, b in pairwise(self.values)):
            raise ConfigError(f"curve: values {self.values}; expected seconds that never fall with the size")
        if max(self.slopes) > _STEEPEST:
            raise ConfigError(
                f"curve: rises by {max(self.slopes):g} s a byte or element; expected at most {_STEEPEST:g}: are two "
                f"knots too near to each other, or sizes not in bytes?"
            )

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """Seconds a byte (or element) of each piece; of a single knot 0."""
        rises = [b - a for a, b in pairwise(self.values)]
        steps = [b - a for a, b in pairwise(self.knots)]
        return tuple(rise / step for rise, step in zip(rises, steps)) or (0.0,)

    def __call__(self, size: float) -> float:
        """Seconds for one size."""
        piece = min(max(bisect_right(self.knots, size) - 1, 0), len(self.slopes) - 1)
        return max(0.0, self.values[piece] + self.slopes[piece] * (size - self.knots[piece]))

    def many(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds for an array of sizes of any shape: float64, the same bits as one call each."""
        sizes = np.asarray(sizes, np.float64)
        piece = np.clip(np.searchsorted(self.knots, sizes, "right") - 1, 0, len(self.slopes) - 1)
        knots, values, slopes = map(np.asarray, (self.knots, self.values, self.slopes))
        return np.maximum(0.0, values[piece] + slopes[piece] * (sizes - knots[piece]))

    @classmethod
    def line(cls, alpha: float, beta: float) -> Curve:
        """alpha + beta · size, seconds and seconds a byte (or element), both at least 0.

        Raises:
            ConfigError: one of them is negative or not finite.
        """
        alpha, beta = schema.convert([alpha, beta], tuple[Seconds, Seconds], "line")
        return cls((0.0, _FAR), (alpha, alpha + beta * _FAR)) if beta else cls((0.0,), (alpha,))

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Curve:
        """The curve with few knots that is nearest to the samples, in the least squares of relative errors.

        Relative, because times range over five orders of magnitude. Knots are measured sizes. Beginning with all of
        them, the knot that is missed least is taken out, again and again; of these curves the one is taken whose
        residual no further knot would lower noticeably, beside what the samples' own medians leave uncertain.

        Raises:
            ConfigError: there are no samples.
        """
        if not samples:
            raise ConfigError("curve: got no samples; expected at least one measured point")
        ordered = sorted(samples, key=lambda s: s.size)
        fitted = _Fit(np.array([s.size for s in ordered], np.float64), np.array([s.seconds for s in ordered]))
        noise = max(_LEAST_NOISE, _median(s.uncertainty for s in ordered))
        knots, values = min(fitted.thinned(), key=lambda found: fitted.score(found[0], found[1], noise))
        rough = cls(tuple(map(float, knots)), tuple(map(float, values)))
        deviation = rough.many(fitted.x) / fitted.t - 1
        return cls(rough.knots, rough.values, float(np.sqrt(np.mean(deviation**2))), tuple(ordered))

    @property
    def spread(self) -> float:
        """Median of the samples' spreads; 0 without samples."""
        return _median(s.spread for s in self.samples)

    @property
    def uncertainty(self) -> float:
        """Relative error of a typical sample's median; 0 without samples."""
        return _median(s.uncertainty for s in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a sample is [size, seconds, spread, repeats]."""
        plain: dict[str, Any] = schema.plain(self)
        return plain

    @classmethod
    def from_json(cls, data: Any) -> Curve:
        """What ``to_json`` made.

        Raises:
            ConfigError: it is not that.
        """
        found: Curve = schema.convert(data, cls, "curve")
        return found


ZERO = Curve((0.0,), (0.0,))
"""What nobody has to do."""


class _Fit:
    """Piecewise linear fits to points (x [n], t [n]), x rising, t > 0."""

    def __init__(self, x: np.ndarray, t: np.ndarray) -> None:
        self.x, self.t = x, t

    def thinned(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Knots and values of the fits with all sizes as knots, then ever fewer, down to a line."""
        knots = np.unique(self.x)
        yield knots, self.values(knots)
        while len(knots) > 2:
            fewer = [np.delete(knots, i) for i in range(1, len(knots) - 1)]
            knots, values = min(((k, self.values(k)) for k in fewer), key=lambda found: self.squares(*found))
            yield knots, values

    def values(self, knots: np.ndarray) -> np.ndarray:
        """Seconds at the knots, by least squares of relative errors among those that never fall."""
        ramps = [np.clip((self.x - a) / (b - a), 0, 1) for a, b in pairwise(knots)]
        columns = np.stack([np.ones_like(self.x), *ramps], axis=1) / self.t[:, None]
        return np.cumsum(_least_squares_from_zero(columns, np.ones_like(self.t)))

    def squares(self, knots: np.ndarray, values: np.ndarray) -> float:
        """Sum of the squared relative errors."""
        return float(np.sum((np.interp(self.x, knots, values) / self.t - 1) ** 2))

    def score(self, knots: np.ndarray, values: np.ndarray, noise: float) -> float:
        """What is least for the right number of knots: residual for the freedom that is left, noise, and each knot."""
        free = max(1, len(self.x) - len(knots))
        return math.log(self.squares(knots, values) / free + noise**2) + _WORTH_OF_A_KNOT * len(knots)


def _least_squares_from_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |a·x - b|², by Lawson and Hanson's active sets (Solving Least Squares Problems, 23)."""
    x, used = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(3 * len(x) + 1):
        gain = np.where(used, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-12 * np.abs(a.T @ b).max():
            break
        used[gain.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[used] = np.linalg.lstsq(a[:, used], b, rcond=None)[0]
            if wanted[used].min(initial=0.0) >= 0:
                break
            falling = used & (wanted < 0)
            steps = np.where(falling, x / np.where(falling, x - wanted, 1.0), np.inf)
            x = x + steps.min() * (wanted - x)
            used &= ~(falling & (steps == steps.min())) & ((x > 0) | ~falling)
            x[~used] = 0.0
        x = wanted
    return x


@dataclass(frozen=True)
class Profile:
    """What a cluster's operations cost.

    A level with a single member (``ranks_per_machine`` 1: intra; ``machines`` 1: inter) needs no curves: it costs
    nothing.

    Attributes:
        machines: above 0.
        ranks_per_machine: of the smallest machine; above 0. All ranks: at most ``schema.MOST_RANKS``.
        codecs: by (spelling, device, direction), over the float32 elements of one payload. Encode is with residual,
            decode adds one payload to a sum.
        moves: by (operation, level, alone), over the bytes that one rank puts in: for allreduce, reduce_scatter and
            reduce the region before; for alltoall all payloads that the rank holds; for allgather and gather its own
            contribution; for broadcast what the root sends. ``alone`` (inter only): one rank of each machine takes
            part; otherwise all ranks of a machine cross at the same time and share its link.
        copies: ``to_host`` and ``to_gpu``, over bytes; empty without a GPU.
        check: what a session does with each tensor before it travels, over its bytes.
        call: seconds that a sync costs whatever it brings.
        tensor: seconds that every tensor (or buffer of fused ones) adds whatever its size.
        segment_bytes: how sessions cut tensors, in bytes between machines; 0: not at all.
        overlaps: whether a tensor in host memory is worked on while another's messages are under way. Not so where
            ranks share cores: there one's waiting is another's work already.
        hidden: the share of the overlap with computing that the timeline expects and that comes true when gradients are
            pushed, 0 to 1. Less than 1 where communication takes cores or memory from the backward pass.
        slowed: by which share of itself the backward pass gets longer when gradients are pushed beside it.
        pushed: seconds that every tensor (or buffer) adds besides where gradients are pushed.
        environment: what it was measured in, or what it describes.
        fingerprint: what a plan made with it depends on.
        measured: False if it was worked out from a description.

    Raises:
        ConfigError: a value or a key is out of its range.
    """

    machines: Ranks
    ranks_per_machine: Ranks
    codecs: Mapping[Codec, Curve]
    moves: Mapping[Move, Curve]
    copies: Mapping[Way, Curve]
    check: Curve
    call: Seconds = 0.0
    tensor: Seconds = 0.0
    segment_bytes: Count = 0
    overlaps: bool = True
    environment: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True
    hidden: Share = 1.0
    slowed: Relative = 0.0
    pushed: Seconds = 0.0

    def __post_init__(self) -> None:
        schema.check(self, "profile")
        check_ranks("profile", machines=self.machines, ranks_per_machine=self.ranks_per_machine)
        for op, level, alone in self.moves:
            if alone and level != "inter":
                raise ConfigError(f"profile: moves: {op}@{level}|alone; expected alone only between machines, @inter")
        for name in ("environment", "fingerprint"):
            object.__setattr__(self, name, _plain(f"profile: {name}", getattr(self, name)))

    # --- what it says ---

    def codec(self, spelling: str, device: DeviceKind, direction: Direction) -> Curve:
        """The curve of a compressor after all schedules, however its spelling orders or omits parameters.

        Raises:
            ConfigError: it was not profiled.
        """
        found = self._by_canonical.get((spelling, device, direction))
        if found is None:
            found = self._by_canonical.get((_canonical(spelling), device, direction))
        if found is None:
            known = ", ".join(sorted({f"{s} on {d}" for s, d, way in self.codecs if way == direction})) or "none"
            raise ConfigError(
                f"profile: {direction} of {spelling!r} on {device} is not in it; it has {known}; profile this "
                f"compressor as well, or leave it out"
            )
        return found

    @cached_property
    def _by_canonical(self) -> dict[Codec, Curve]:
        """The codecs' curves by canonical spellings."""
        return {(_canonical(spelling), device, way): curve for (spelling, device, way), curve in self.codecs.items()}

    def move(self, op: Op, level: Level, alone: bool = False) -> Curve:
        """The curve of a collective; zero at a level with a single member.

        Raises:
            ConfigError: it was not profiled.
        """
        # The only rank of a machine is always alone.
        same = self.ranks_per_machine == 1 and level == "inter"
        for key in ((op, level, alone), (op, level, not alone)) if same else ((op, level, alone),):
            if key in self.moves:
                return self.moves[key]
        if self.members(level) == 1:
            return ZERO
        known = ", ".join(sorted(map(_move_key, self.moves))) or "none"
        raise ConfigError(
            f"profile: {_move_key((op, level, alone))} is not in it; it has {known}; profile the cluster again"
        )

    def members(self, level: Level) -> int:
        """How many ranks a group of a level has, on the smallest machine."""
        return {
            "flat": self.machines * self.ranks_per_machine,
            "intra": self.ranks_per_machine,
            "inter": self.machines,
        }[level]

    def copy(self, way: Way) -> Curve:
        """The curve of a copy between host and GPU memory.

        Raises:
            ConfigError: it was not profiled.
        """
        if way not in self.copies:
            raise ConfigError(
                f"profile: copies {way} are not in it; it has {', '.join(self.copies) or 'none'}; profile on a machine "
                f"with a GPU, or use CPU tensors and devices=('cpu',)"
            )
        return self.copies[way]

    def curves(self) -> Iterator[tuple[str, Curve]]:
        """All curves with their keys in words."""
        yield from ((f"codec {_codec_key(key)}", curve) for key, curve in self.codecs.items())
        yield from ((f"move {_move_key(key)}", curve) for key, curve in self.moves.items())
        yield from ((f"copy {key}", curve) for key, curve in self.copies.items())
        yield "check", self.check

    def noise(self) -> float:
        """The relative error that the measured medians typically have: the median over the measured curves; else 0."""
        return _median(curve.uncertainty for _, curve in self.curves() if curve.samples)

    # --- files ---

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, with keys such as ``onebit|cpu|encode`` and ``alltoall@inter|alone``."""
        return {
            **KIND.header(),
            **{name: getattr(self, name) for name in _PLAIN},
            "check": self.check.to_json(),
            "copies": {key: curve.to_json() for key, curve in self.copies.items()},
            "moves": {_move_key(key): curve.to_json() for key, curve in self.moves.items()},
            "codecs": {_codec_key(key): curve.to_json() for key, curve in self.codecs.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """What ``to_json`` made.

        Raises:
            ConfigError: it is of another kind or version, an entry is missing or unknown, or a value does not fit.
        """
        found = vars(schema.convert(KIND.content(data), _Document, "profile"))
        codecs = {_codec(key): curve for key, curve in found["codecs"].items()}
        moves = {_move(key): curve for key, curve in found["moves"].items()}
        return cls(**{**found, "codecs": codecs, "moves": moves})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON: all of it, or nothing if that fails.

        Raises:
            ConfigError: the file cannot be written.
        """
        schema.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read it from JSON.

        Raises:
            ConfigError: the file cannot be read or holds no valid profile of this version.
        """
        return schema.load(path, cls.from_json, MOST_BYTES, how=KIND.how)


@dataclass(frozen=True)
class _Document:
    """The content of a file; the attributes are those of ``Profile``, and the curves have text for keys."""

    measured: bool
    machines: Ranks
    ranks_per_machine: Ranks
    call: Seconds
    tensor: Seconds
    segment_bytes: Count
    overlaps: bool
    hidden: Share
    slowed: Relative
    pushed: Seconds
    fingerprint: dict[str, Any]
    environment: dict[str, Any]
    check: Curve
    copies: dict[Way, Curve]
    moves: dict[str, Curve]
    codecs: dict[str, Curve]


_PLAIN = tuple(f.name for f in fields(_Document) if f.name not in ("check", "copies", "moves", "codecs"))


def difference(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str] = ("there", "here")) -> list[str]:
    """What differs between two fingerprints, one line an entry; empty if they agree.

    Args:
        names: what the two are called, such as ("the plan", "this job").
    """
    lines = []
    for key in sorted({*a, *b}):
        left, right = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += [f"{key}.{line}" for line in difference(left, right, names)]
        elif left != right:
            lines.append(f"{key}: {_word(left)} ({names[0]}), {_word(right)} ({names[1]})")
    return lines


_ABSENT = object()


def _word(value: Any) -> str:
    return "not said" if value is _ABSENT else str(value)


# --- keys -------------------------------------------------------------------------------------------------------------


def _codec_key(key: Codec) -> str:
    return "|".join(key)


def _move_key(key: Move) -> str:
    op, level, alone = key
    return f"{op}@{level}" + ("|alone" if alone else "")


def _codec(key: str) -> Any:
    if key.count("|") != 2:
        raise ConfigError(
            f"profile: codecs: got the key {key!r}; expected spelling, cpu or gpu, encode or decode, such as "
            f"'onebit|cpu|encode'"
        )
    return tuple(key.split("|"))


def _move(key: str) -> Any:
    op, _, rest = key.partition("@")
    level, bar, alone = rest.partition("|")
    return op, level, (alone == "alone" or alone) if bar else False


def check_ranks(where: str, **given: int) -> None:
    """Refuse two numbers, by their names, of machines and of ranks on each, that make too large a job.

    Raises:
        ConfigError: naming both.
    """
    if math.prod(given.values()) > MOST_RANKS:
        said = " and ".join(f"{name} {number}" for name, number in given.items())
        raise ConfigError(
            f"{where}: got {said}, which make {math.prod(given.values())} ranks; expected at most {MOST_RANKS} in all"
        )


def _canonical(spelling: str) -> str:
    """The spelling that ``str`` gives of the compressor after all schedules; as it is if it names none known here."""
    try:
        return str(get(spelling).at(None))
    except ConfigError:
        return spelling


# --- plain values -----------------------------------------------------------------------------------------------------


def _plain(what: str, value: Any) -> dict[str, Any]:
    """A mapping as JSON gives it back: lists for tuples, text for keys."""
    try:
        text = json.dumps(dict(value), allow_nan=False)
        json_text.refuse(text.encode())  # else it could be written, and not be read
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what}: got {schema.shown(value)} that JSON cannot hold ({error}); expected plain values"
        ) from None
    return dict(plain)


def _median(values: Iterable[float]) -> float:
    return float(np.median(found)) if (found := list(values)) else 0.0
