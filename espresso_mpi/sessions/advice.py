"""One line for a session whose compressor of gradients is known not to train with the usual optimizers."""

from __future__ import annotations

import logging

from ..engine.batches import Batch
from ..options import POOR_UNDER_ADAM, POOR_UNDER_MOMENTUM

_LOG = logging.getLogger("espresso_mpi")

DIVIDE = "divide by a root of second moments"
"""What such optimizers do."""


class Advice:
    """Warns once of a compressor that ends above the loss of fp32.

    A session does not see the optimizer of a training loop. Adapters and optimizers that synchronise by themselves know
    it, and omit the line (``Session.judge_for``).

    Args:
        silent: whether nothing is said at all, as on all ranks but one.
    """

    def __init__(self, silent: bool) -> None:
        self._open, self._adam = not silent, False

    def told(self, rule: str | None) -> None:
        """Somebody says what the means are for: see ``Session.judge_for``."""
        if rule == "adam":
            self._adam = True
        else:
            self._open = False

    def look(self, batch: Batch) -> None:
        """These tensors come for the first time, in a ``sync`` or ``push``."""
        if not self._open:
            return
        specs = [item.strategy.compressor for item in batch.items if item.compressor is not None]
        spec = next((spec for spec in specs if kind_of(spec) in POOR_UNDER_ADAM), None)
        if spec is None:
            return
        self._open = False
        also = kind_of(spec) in POOR_UNDER_MOMENTUM and not self._adam
        warn_of(
            f"compressor {spec!r}",
            "AdamW or SGD with momentum" if also else f"AdamW and others that {DIVIDE}",
            f"espresso_mpi.optim.OnebitAdam{' or MomentumSGD' if also else ''}, or ",
            "" if self._adam else "; with another optimizer, session.judge_for(None) before omits this line",
        )


def kind_of(spec: str) -> str:
    """The method of a spec; ``eden`` in one bit is ``drive``."""
    name, _, parameters = spec.partition(":")
    return "drive" if name == "eden" and "bits=1" in parameters.split(",") else name


def warn_of(what: str, optimizer: str, instead: str, more: str = "") -> None:
    """Say which compressor and optimizer do not go together, and what to use.

    Args:
        what: the line begins with it.
        instead: optimizers to take, with what follows them in the sentence; may be empty.
        more: the line ends with it.
    """
    _LOG.warning(
        "%s: under %s, gradients compressed like this ended more than 1 %% above the loss of fp32; use "
        "%scompressor='int8' or 'int4' (docs/choosing.md)%s",
        what, optimizer, instead, more,
    )  # fmt: skip
