"""The statistics of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .recording import TensorStats


@dataclass(frozen=True)
class Stats:
    """The statistics of a session so far, on this rank.

    Attributes:
        steps: number of calls of ``sync``; those of ``push`` count for their tensors only.
        seconds: time inside calls of ``sync`` and ``wait``.
        seconds_by: time by kind: check (the search for NaN), agree, encode, wire (collectives with their sums and
            waits), wait (the part of wire in which the rank only waited), decode. Tensors overlap, so the sum may
            exceed the elapsed time.
        bytes_by_level: bytes sent to other ranks inside the node ("intra") and between nodes ("inter").
        skipped: number of steps in which a tensor was skipped because it was not finite. With
            ``nonfinite="skip_all"``, another tensor of the call can be the reason.
        saturated: number of values that were cut on this rank. Encodes cut values (``fp16`` beyond 65504, ``onebit``
            and ``onebit_sgd`` if the magnitudes of a block sum to more than the range of float32), and so do sums of
            payloads (integers of ``thc``, float16).
        tensors: the statistics of each tensor, by name.
        skipped_calls: number of calls that were skipped as a whole.

    Example:
        >>> with espresso_mpi.Session() as session:
        ...     mean = session.sync({"w": np.ones(4, np.float32)})
        ...     session.stats().steps
        1
    """

    steps: int
    seconds: float
    seconds_by: Mapping[str, float]
    bytes_by_level: Mapping[str, int]
    skipped: Mapping[str, int]
    saturated: int = 0
    tensors: Mapping[str, TensorStats] = field(default_factory=dict)
    skipped_calls: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to other ranks, on all levels."""
        return sum(self.bytes_by_level.values())

    def __str__(self) -> str:
        """Some lines without those of the tensors, as ``print`` shows them; ``repr`` has all fields.

        Example:
            >>> print(Stats(8, 0.5, {"agree": 0.1, "wire": 0.4}, {"intra": 0, "inter": 2_500_000}, {}))
            8 calls of sync, 0.500 s in sync and wait
            seconds: agree 0.100, wire 0.400
            sent: 0.0 MB inside the node, 2.5 MB between nodes
        """
        inside, between = (self.bytes_by_level.get(level, 0) / 1e6 for level in ("intra", "inter"))
        lines = [
            f"{self.steps} calls of sync, {self.seconds:.3f} s in sync and wait",
            f"seconds: {', '.join(f'{kind} {seconds:.3f}' for kind, seconds in self.seconds_by.items())}",
            f"sent: {inside:.1f} MB inside the node, {between:.1f} MB between nodes",
        ]
        if self.saturated or self.skipped or self.skipped_calls:
            skipped = sum(self.skipped.values())
            lines.append(f"cut: {self.saturated} values; skipped: {skipped} tensors, {self.skipped_calls} calls")
        return "\n".join(lines)
