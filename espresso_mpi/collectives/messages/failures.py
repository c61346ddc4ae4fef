"""Converts errors of the MPI library to errors that name the rank and the operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from espresso_mpi.errors import TransportError

if TYPE_CHECKING:
    from .transport import Transport

_Method = TypeVar("_Method", bound=Callable[..., Any])


def named(doing: str) -> Callable[[_Method], _Method]:
    """Decorator of Transport methods: raises errors of MPI as a TransportError with the rank and the operation."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def attempt(transport: Transport, *arguments: Any) -> Any:
            try:
                return method(transport, *arguments)
            except _raised_by_mpi() as error:
                who = transport.describe(transport.rank)
                raise failure(who, f"{doing} in {transport.waiter.what}", error) from error

        return cast(_Method, attempt)

    return decorate


def _raised_by_mpi() -> type[Exception]:
    from mpi4py import MPI

    kind: type[Exception] = MPI.Exception
    return kind


def failure(who: str, doing: str, error: Exception) -> TransportError:
    """The error for an exception of MPI on this rank."""
    return TransportError(
        f"{who}: MPI failed while {doing}: {error}; look for the first message of the MPI library or of the launcher "
        f"about this rank or its network, and start the job again from the last saved state"
    )
