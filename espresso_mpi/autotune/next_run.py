"""The plan that a session chose, as it is kept for the next run in the file ``Tuning.plan_file``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..collectives.messages.agreement import on_rank_0
from ..collectives.messages.transport import Transport
from ..engine.batches import versions
from ..errors import ConfigError
from ..options import Options
from ..tuning import Tuning
from ..types import Plan
from .fidelity import Fidelity
from .trials import Trials
from .tried import Trial

if TYPE_CHECKING:
    from ..planner.model.workload import Workload

_LOG = logging.getLogger("espresso_mpi")


class NextRun:
    """Says how plans were chosen, and writes them. Methods are collective, unless they say otherwise.

    Args:
        options: those of now; fidelity: knows the optimizer.

    Attributes:
        kept: what was written last as ``Chosen.tried``; empty before.
        paused: whether the log says that the trials pause.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, options: Callable[[], Options], fidelity: Fidelity
    ) -> None:  # fmt: skip
        self._transport, self._tuning = transport, tuning
        self._options, self._fidelity = options, fidelity
        self.kept: Mapping[str, tuple[float, int]] = {}
        self.paused = False

    def pausing(self, trials: Trials, workload: Workload) -> None:
        """Say in the log that the trials pause, and write the quickest plan so far, if there are new times."""
        if not self.paused and self._transport.rank == 0:
            _LOG.info(
                "planning pauses: the session follows the quickest plan so far, and tries others as long as planning "
                "costs at most %.3g %% of the time; the log says when it has ended", 100 * self._tuning.share,
            )  # fmt: skip
        self.paused = True
        if self._tuning.plan_file is not None and (tried := trials.times) != self.kept:
            self.kept = tried
            self.write(self.chosen(trials.results()[0], workload, tried))

    def ends_early(self) -> None:
        """The session ends while plans are tried: say so if it leaves none to the next run. Not collective."""
        if self._tuning.plan_file is not None and not self.kept and self._transport.rank == 0:
            _LOG.warning("%s: no plan was written: the run ended before its trials", self._tuning.plan_file)

    def chosen(self, best: Trial, workload: Workload, tried: Mapping[str, tuple[float, int]] | None = None) -> Plan:
        """The plan of a trial, with how it was chosen, and what for.

        Args:
            tried: as ``Chosen.tried``; None: the trials have ended.
        """
        from . import autoplan, earlier_run

        rule = self._fidelity.agreed_rule(self._transport)
        made = best.plan.made_for or autoplan.made_for(self._transport.topology, workload)
        return replace(
            best.plan,
            made_for=made if made.fingerprint else replace(made, fingerprint=versions()),
            chosen=earlier_run.chosen_by(self._options(), self._tuning, rule, best.seconds, tried),
        )

    def write(self, plan: Plan) -> None:
        """Write a plan, on rank 0, if a file is named.

        Raises:
            ConfigError: on every rank: it cannot be written.
        """
        if self._tuning.plan_file is not None:
            from ..planner.planfile import save

            path = str(self._tuning.plan_file)
            on_rank_0(self._transport, lambda: save(plan, path), ConfigError)
