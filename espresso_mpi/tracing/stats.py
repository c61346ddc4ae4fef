"""What a session tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .recording import TensorStats


@dataclass(frozen=True)
class Stats:
    """What a session did so far, on this rank.

    ``seconds`` is the time inside calls of ``sync`` and ``wait``; ``seconds_by`` splits the work by kind: check
    (looking for NaN), agree, encode, wire (collectives with their sums and waits), wait (the part of wire in which the
    rank did nothing else), decode. Tensors travel side by side, so these may add up to more than the time that passed.
    ``bytes_by_level`` counts bytes sent to other ranks inside the node and between nodes; ``skipped`` the steps
    that a tensor sat out because it, or with ``nonfinite="skip_all"`` another tensor of the call, was not finite, and
    ``skipped_calls`` the calls that were left out as a whole; ``saturated`` counts what was cut on this rank because it
    left its range: values in an encode (``fp16`` beyond 65504, ``onebit`` and ``onebit_sgd`` where the magnitudes of
    a block sum to more than float32 holds) and sums of payloads (integers of thc, float16). ``tensors`` has the same
    for each tensor, and for its latest step.

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
