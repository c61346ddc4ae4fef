"""DeMo (Peng et al., 2024): momenta that stay on each rank, but for the largest of their frequencies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ConfigError
from .rules import Count, Rule, Slot, SynchronisedOptimizer
from .settings import DeMoSettings
from .updates import SIGN_STEP

if TYPE_CHECKING:
    from ..session import Session
    from ..tuning import OptimizerRule


_LOG = logging.getLogger("espresso_mpi")


def require_residuals(owner: str, session: Session) -> None:
    """Refuse a session whose residuals are no momenta, and warn of one that may have no β, or no momenta.

    Raises:
        ConfigError: it has no plain error feedback.
    """
    if session.feedback.kind == "auto" and session.rank == 0:
        _LOG.warning(
            "%s: the session has feedback='auto': β is 1, and compressors without feedback leave no momentum; the "
            "paper has feedback='plain:decay=0.999' with compressor='dct_topk'", owner,
        )  # fmt: skip
    if session.feedback.kind not in ("auto", "plain"):
        raise ConfigError(
            f"{owner}: the session has feedback={str(session.feedback)!r}; expected 'plain:decay=0.999', whose "
            f"residuals are the momenta"
        )


@dataclass(frozen=True)
class Counters:
    """The state of the optimizer: the number of steps. The momenta are residuals of the session."""

    steps: Count


class DeMoRule(Rule[Counters]):
    """What DeMo does with the parameters of one step.

    Args:
        session: synchronises the gradients; its error feedback keeps the momenta.

    Raises:
        ConfigError: the session has no plain error feedback, or would skip values that are not finite.
    """

    owner: ClassVar[str] = "DeMo"
    kept: ClassVar = {}
    judged_for: ClassVar[OptimizerRule] = "adam"  # it moves along signs

    def __init__(self, session: Session) -> None:
        super().__init__(session, Counters(0))
        require_residuals(self.owner, session)

    def step(self, slots: Sequence[Slot[DeMoSettings]]) -> None:
        """The mean of what the ranks extract, then a step along it or along its sign."""
        for slot in slots:
            slot.put_gradient()
        self._sync(slots)
        self.counters = replace(self.counters, steps=self.counters.steps + 1)
        for slot in slots:
            s = slot.settings
            along, signed = (0.0, s.lr) if s.sign else (s.lr, 0.0)
            numbers = (1 - s.lr * s.weight_decay, along, signed)
            SIGN_STEP(slot.tensor.library, (slot.tensor.array, slot.flat), numbers)


class DeMo(SynchronisedOptimizer):
    """Decoupled momentum: each rank keeps a momentum of its own, and the ranks share only its largest frequencies.

    In each step a rank adds its gradient to its momentum, extracts the k largest coefficients of the cosine transform
    of each chunk, and takes them out of the momentum. The mean of what was extracted, q, gives the step::

        mᵢ ← β mᵢ + gᵢ;  qᵢ = C(mᵢ);  mᵢ ← mᵢ - qᵢ;  q = mean of qᵢ;  x ← (1 - η λ) x - η sign(q)

    This is error feedback with a decay. The momenta are the residuals of the session and take no other memory: C is the
    compressor of the session, and β the decay of its feedback.

    - The equations hold for routes that compress once (``route="flat-allgather"``). With several ranks per node, the
      momenta belong to nodes. Routes that compress the mean again keep a residual of it, too.
    - Tensors below the session's ``min_bytes`` have q = g, and so have all tensors on one rank.
    - The paper transforms squares of 64 × 64 in two dimensions. Here, chunks of the flat tensor are transformed.
    - The paper's code averages a coefficient over the ranks that have sent it. Here, the mean is over all ranks.

    Args:
        params, lr, weight_decay: see ``rules.SynchronisedOptimizer``.
        session: a session with ``compressor="dct_topk:…"`` and ``feedback="plain:decay=0.999"``, the β of the paper.
            With ``"auto"``, β is 1, and compressors without feedback have no momentum; a warning says so. Other kinds
            of feedback are a ConfigError.
        sign: step along the sign of q, as in the experiments of the paper. Otherwise step along q.

    Example:
        >>> params = {"w": np.ones((64, 128), np.float32)}
        >>> with espresso_mpi.Session(compressor="dct_topk:k=4", feedback="plain:decay=0.999") as session:
        ...     demo = espresso_mpi.optim.DeMo(params, session, lr=0.125)
        ...     for step in range(2):
        ...         grads = {"w": np.full((64, 128), 0.5, np.float32)}  # of this rank, not synchronised
        ...         params = demo.step(grads)
        >>> round(float(params["w"].mean()), 3)
        0.75
    """

    def __init__(
        self, params: Any, session: Session, lr: float = 1e-3, weight_decay: float = 0.0, sign: bool = True
    ) -> None:
        super().__init__(params, DeMoRule(session), DeMoSettings.checked("DeMo", lr, weight_decay, sign))
