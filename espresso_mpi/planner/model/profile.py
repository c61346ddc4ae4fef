"""What a cluster costs: the time of every encode, decode, collective and copy as a function of its size.

A ``Profile`` is measured on the cluster, or worked out from a description (``planner.cluster``), and kept as JSON.
Times are in seconds throughout, sizes in bytes, or in float32 elements where a codec is concerned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema
from espresso_mpi.files.schema import MOST_RANKS, Count, Ranks, Relative, Seconds
from espresso_mpi.types import DeviceKind, Level, Op

from .curve import ZERO, Curve, median
from .profile_json import KIND, MOST_BYTES, Share, decoded, encoded, plain
from .profile_keys import Codec, CopyDirection, Direction, Move, codec_key, move_key


@dataclass(frozen=True)
class Profile:
    """What a cluster's operations cost.

    A level with a single member (``ranks_per_node`` 1: intra; ``nodes`` 1: inter) needs no curves: it costs
    nothing.

    Attributes:
        nodes: above 0.
        ranks_per_node: of the smallest node; above 0. All ranks: at most ``schema.MOST_RANKS``.
        codecs: by (spec, device, direction), over the float32 elements of one payload. Encode is with residual,
            decode adds one payload to a sum.
        moves: by (operation, level, alone), over the bytes that one rank puts in: for allreduce, reduce_scatter and
            reduce the region before; for alltoall all payloads that the rank holds; for allgather and gather its own
            contribution; for broadcast what the root sends. ``alone`` (inter only): one rank of each node takes
            part; otherwise all ranks of a node cross at the same time and share its link.
        copies: ``to_host`` and ``to_gpu``, over bytes; empty without a GPU.
        check: what a session does with each tensor in host memory before it travels, over its bytes.
        check_on_gpu: the same on a GPU, of one tensor among several; None: as in host memory.
        call: seconds that a sync costs whatever it brings.
        tensor: seconds that every tensor (or buffer of fused ones) adds whatever its size.
        segment_bytes: how sessions cut tensors, in bytes between nodes; 0: not at all.
        overlaps: whether work on a tensor in host memory hides the messages of another. It does not where ranks share
            cores: there other ranks work while one waits.
        hidden: of the overlap with computing that the timeline expects, the share that is measured when gradients are
            pushed, 0 to 1. It is less than 1 where communication takes cores or memory from the backward pass.
        slowed: by which share of itself the backward pass gets longer when gradients are pushed beside it.
        pushed: seconds that every tensor (or buffer) adds besides where gradients are pushed.
        environment: what it was measured in, or what it describes.
        fingerprint: what a plan made with it depends on.
        measured: False if it was worked out from a description.

    Raises:
        ConfigError: a value or a key is out of its range.

    Example:
        >>> profile = espresso_mpi.planner.TESTBEDS["pcie-25g"].profile()
        >>> profile.nodes, profile.ranks_per_node
        (8, 8)
        >>> profile.move("allreduce", "inter")(1 << 20) > profile.move("allreduce", "inter")(1 << 10)  # seconds
        True
    """

    nodes: Ranks
    ranks_per_node: Ranks
    codecs: Mapping[Codec, Curve]
    moves: Mapping[Move, Curve]
    copies: Mapping[CopyDirection, Curve]
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
    check_on_gpu: Curve | None = None

    def __post_init__(self) -> None:
        schema.check(self, "profile")
        check_ranks("profile", nodes=self.nodes, ranks_per_node=self.ranks_per_node)
        for op, level, alone in self.moves:
            if alone and level != "inter":
                raise ConfigError(f"profile: moves: {op}@{level}|alone; expected alone only between nodes, @inter")
        for name in ("environment", "fingerprint"):
            object.__setattr__(self, name, plain(f"profile: {name}", getattr(self, name)))

    # --- what it says ---

    def codec(self, spec: str, device: DeviceKind, direction: Direction) -> Curve:
        """The curve of a compressor after all schedules, however its spec orders or omits parameters.

        Raises:
            ConfigError: it was not profiled.
        """
        found = self._by_canonical.get((spec, device, direction))
        if found is None:
            found = self._by_canonical.get((_canonical(spec), device, direction))
        if found is None:
            known = ", ".join(sorted({f"{s} on {d}" for s, d, known in self.codecs if known == direction})) or "none"
            raise ConfigError(
                f"profile: {direction} of {spec!r} on {device} is not in it; it has {known}; profile this "
                f"compressor as well, or leave it out"
            )
        return found

    @cached_property
    def _by_canonical(self) -> dict[Codec, Curve]:
        """The codecs' curves by canonical specs."""
        return {(_canonical(spec), device, codec): curve for (spec, device, codec), curve in self.codecs.items()}

    def move(self, op: Op, level: Level, alone: bool = False) -> Curve:
        """The curve of a collective; zero at a level with a single member.

        Raises:
            ConfigError: it was not profiled.
        """
        # The only rank of a node is always alone.
        same = self.ranks_per_node == 1 and level == "inter"
        for key in ((op, level, alone), (op, level, not alone)) if same else ((op, level, alone),):
            if key in self.moves:
                return self.moves[key]
        if self.members(level) == 1:
            return ZERO
        known = ", ".join(sorted(map(move_key, self.moves))) or "none"
        raise ConfigError(
            f"profile: {move_key((op, level, alone))} is not in it; it has {known}; profile the cluster again"
        )

    def members(self, level: Level) -> int:
        """How many ranks a group of a level has, on the smallest node."""
        return {
            "flat": self.nodes * self.ranks_per_node,
            "intra": self.ranks_per_node,
            "inter": self.nodes,
        }[level]

    def copy(self, direction: CopyDirection) -> Curve:
        """The curve of a copy between host and GPU memory.

        Raises:
            ConfigError: it was not profiled.
        """
        if direction not in self.copies:
            raise ConfigError(
                f"profile: copies {direction} are not in it; it has {', '.join(self.copies) or 'none'}; profile on a "
                f"node with a GPU, or use CPU tensors and devices=('cpu',)"
            )
        return self.copies[direction]

    def checking(self, device: DeviceKind) -> Curve:
        """The curve of the check of a tensor on a device."""
        return self.check if device == "cpu" or self.check_on_gpu is None else self.check_on_gpu

    def curves(self) -> Iterator[tuple[str, Curve]]:
        """All curves with their keys in words."""
        yield from ((f"codec {codec_key(key)}", curve) for key, curve in self.codecs.items())
        yield from ((f"move {move_key(key)}", curve) for key, curve in self.moves.items())
        yield from ((f"copy {key}", curve) for key, curve in self.copies.items())
        yield "check", self.check
        if self.check_on_gpu is not None:
            yield "check on the gpu", self.check_on_gpu

    def noise(self) -> float:
        """The relative error that the measured medians typically have: the median over the measured curves; else 0."""
        return median(curve.uncertainty for _, curve in self.curves() if curve.samples)

    # --- files ---

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, with keys such as ``onebit|cpu|encode`` and ``alltoall@inter|alone``."""
        return encoded(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """What ``to_json`` made.

        Raises:
            ConfigError: it is of another kind or version, an entry is missing or unknown, or a value does not fit.
        """
        return cls(**decoded(data))

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


def check_ranks(where: str, **given: int) -> None:
    """Refuse two numbers, by their names, of nodes and of ranks on each, that make too large a job.

    Raises:
        ConfigError: naming both.
    """
    if math.prod(given.values()) > MOST_RANKS:
        said = " and ".join(f"{name} {number}" for name, number in given.items())
        raise ConfigError(
            f"{where}: got {said}, which make {math.prod(given.values())} ranks; expected at most {MOST_RANKS} in all"
        )


def _canonical(spec: str) -> str:
    """The spec that ``str`` gives of the compressor after all schedules; as it is if it names none known here."""
    try:
        return str(get(spec).at(None))
    except ConfigError:
        return spec
