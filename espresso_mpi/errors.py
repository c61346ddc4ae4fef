"""Every error that this package raises on purpose.

They all derive from `EspressoError`, so that a caller can catch them with one
clause; those that are also a kind of built-in error derive from it as well.
"""


class EspressoError(Exception):
    """Base of all errors of this package; the text says how to correct the error."""


class ConfigError(EspressoError, ValueError):
    """An option or a combination of options is not valid."""


class GradientError(EspressoError, ValueError):
    """A gradient array has a shape, dtype, device or layout that cannot be synchronised."""


class MismatchError(EspressoError):
    """The ranks disagree about what they are synchronising."""


class NonFiniteError(EspressoError):
    """A gradient holds a NaN, an infinity, or values too large to be compressed and summed."""


class BoundError(EspressoError):
    """The result could be beyond the error bound that was asked for; the text says what would keep it."""


class RankTimeoutError(EspressoError, TimeoutError):
    """A rank did not take part in a collective within the time allowed."""


class RemoteError(EspressoError):
    """Another rank failed or left; the text says which and why."""


class TransportError(EspressoError):
    """The MPI library failed on this rank; the text names the operation and quotes the library."""


class PayloadError(EspressoError):
    """A compressed payload is damaged, truncated or of another format."""


class LabUnavailable(EspressoError):  # noqa: N818 - names a state, as BlockingIOError does
    """The emulated cluster cannot run on this node; the text names what is missing."""


class StateError(EspressoError):
    """A call is not allowed at this time, or a saved state does not fit."""


class PlanError(EspressoError):
    """No valid plan exists, or a plan does not fit the model or the node."""
