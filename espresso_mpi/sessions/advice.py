"""One line for a session whose compressor of gradients is known not to train with the usual optimizers."""

from __future__ import annotations

import logging

from ..engine.batches import Batch
from ..options import POOR_UNDER_ADAM, POOR_UNDER_MOMENTUM

_LOG = logging.getLogger("espresso_mpi")


class Advice:
    """Warns once of a compressor that ends above the loss of fp32.

    A session does not see the optimizer of a training loop. Adapters and optimizers that synchronise by themselves tell
    it (``Session.judge_for``). If nobody has done so by the first message that is compressed, the line names the
    optimizers that the compressor does not go with.

    Args:
        spec: the compressor of the session; None: a plan chooses it.
        silent: whether nothing is said at all, as on all ranks but one.
    """

    def __init__(self, spec: str | None, silent: bool) -> None:
        self._spec = spec or "none"
        self._kind = self._spec.partition(":")[0]
        self._open = not silent and self._kind in POOR_UNDER_ADAM

    def omit(self) -> None:
        """Somebody knows the optimizer: see ``Session.judge_for``."""
        self._open = False

    def look(self, batch: Batch | None) -> None:
        """A call is made with these tensors; None: with an error."""
        if not self._open or batch is None or all(item.compressor is None for item in batch.items):
            return
        self._open = False
        also = self._kind in POOR_UNDER_MOMENTUM
        warn_of(
            "AdamW or SGD with momentum" if also else "AdamW",
            self._spec,
            f"espresso_mpi.optim.OnebitAdam{' or MomentumSGD' if also else ''}, or ",
            f"; with {'plain SGD' if also else 'SGD'}, session.judge_for('sgd') omits this line",
        )


def warn_of(optimizer: str, spec: str, instead: str, more: str = "") -> None:
    """Say which optimizer and compressor do not go together, and what to use.

    Args:
        instead: optimizers to take, with what follows them in the sentence; may be empty.
        more: what the line ends with.
    """
    _LOG.warning(
        "%s with compressor %r: under this optimizer, gradients compressed like this ended more than 1 %% above the "
        "loss of fp32; use %scompressor='int8' or 'int4' (docs/choosing.md)%s",
        optimizer, spec, instead, more,
    )  # fmt: skip
