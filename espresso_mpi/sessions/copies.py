"""Broadcast, gather and alltoall of compressed data: how it is compressed, and what a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import compressors
from ..collectives.copies import Copies, CopyKind
from ..collectives.data.layout import Topology
from ..collectives.messages.agreement import fingerprint
from ..collectives.store_keys import OF_RANK
from ..engine.batches import Batch, Item
from ..errors import ConfigError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options
from ..types import ITEMSIZE, Route, Strategy, TensorSpec

_ROUTE = Route.parse("flat-allgather")
"""Stands for the way of all copies: they take no route."""


@dataclass(frozen=True)
class Coding:
    """What a call asks for."""

    name: str
    compressor: str
    feedback: Feedback | str | bool

    @property
    def wanted(self) -> bool:
        """Whether anything is compressed."""
        return self.compressor not in (None, "none")


def copies_of(
    kind: CopyKind, spec: TensorSpec, topology: Topology, coding: Coding, given: Sequence[int], taken: Sequence[int],
    rank: int, root: int = 0, splits: bool = False,
) -> Batch | None:  # fmt: skip
    """A copying collective that is compressed; None: it is not, or there is but one rank.

    Args:
        spec: of the array that is read.
        given, taken: as of ``Copies``.
        splits: whether the ranks may have different numbers of rows.

    Raises:
        ConfigError: the arguments do not go together.
    """
    options, problem = Options.checked(compressor=coding.compressor, feedback=coding.feedback, min_bytes=0)
    if problem:
        raise ConfigError(f"{kind}: {problem}")
    if not coding.wanted:
        return None
    if spec.dtype not in ITEMSIZE:
        raise ConfigError(
            f"{kind}: compressor={coding.compressor!r} of {spec.dtype}; only floating-point numbers are compressed; "
            f"leave it out"
        )
    method = compressors.get(options.compressor).shaped(spec.shape).second_pass()
    if not method.averages:
        raise ConfigError(
            f"{kind}: the result of compressor {str(method)!r} is no approximation of what it compresses; use another "
            f"one such as 'onebit' or 'topk'"
        )
    copies = Copies(kind, root, tuple(given), tuple(taken), not splits, spec.device)
    how = options.feedback.resolved(method, copies.size)
    if how != NO_FEEDBACK and not coding.name:
        raise ConfigError(f"{kind}: feedback={str(how)!r} without a name; the residual is kept under it: pass name=")
    if topology.size == 1 and how.momentum == 1:
        return None
    kept = f"{kind} {coding.name}".strip() + OF_RANK
    item = Item(0 if kind == "broadcast" else 1, TensorSpec(kept, (copies.size,), spec.dtype, spec.device),
                Strategy(options.compressor, _ROUTE), method, how, half=copies)  # fmt: skip
    like = replace(spec, name="x", shape=spec.shape[1:]) if splits else replace(spec, name="x")
    shown = (("x", f"rows of {like}" if splits else str(like), spec.device),) * (item.index + 1)
    digest = fingerprint([kind, root, options.compressor, str(how), kept, splits, *map(list, shown)])
    anyone = copies.size > 0 or splits
    reads = sum(given) > 0
    return Batch((replace(spec, name=kept),), (item,) if anyone else (), digest, exact=not reads, tensors=shown,
                 sizes=(copies.given, copies.taken) if splits else None)  # fmt: skip


class Splits:
    """The splits of alltoalls with feedback: a residual belongs to a block, so the blocks must stay."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def require_same(self, coding: Coding, sent: Sequence[int]) -> None:
        """Refuse other splits than those of the call of this name before.

        Raises:
            ConfigError: they differ.
        """
        if not coding.name or not coding.wanted or coding.feedback in ("none", False, NO_FEEDBACK):
            return
        before = self._known.setdefault(coding.name, list(sent))
        if before != list(sent):
            raise ConfigError(
                f"alltoall: splits={list(sent)} of {coding.name!r}, which had {before} before; feedback keeps a "
                f"residual for each block: use a name for each splitting, or feedback='none'"
            )
