"""What optimizers that synchronise by themselves ask of a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, EspressoError

if TYPE_CHECKING:
    from ..session import Session
    from ..sessions.handles import Handle
    from ..tuning import OptimizerRule


def check_session(owner: str, session: Session, rule: OptimizerRule | None = None) -> None:
    """Refuse a session that skips values that are not finite: what one call skips, another may not.

    Args:
        rule: what the session judges compressors for; None: the messages are of another kind than gradients and
            momenta. See ``Session.judge_for``.

    Raises:
        ConfigError: it does.
    """
    if session.nonfinite != "raise":
        raise ConfigError(
            f"{owner}: the session has nonfinite={session.nonfinite!r}; expected 'raise': the ranks would go on with "
            f"different parameters after a message that is skipped"
        )
    if rule is not None:
        session.judge_for(rule)
    session.judge_for(None)  # what the messages are is known


def wait_for(handles: Iterable[Handle]) -> list[Any]:
    """Wait for all calls; returns their results.

    Raises:
        EspressoError: the first error, after all have ended.
    """
    errors, results = [], []
    for handle in handles:
        try:
            results.append(handle.wait())
        except EspressoError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
