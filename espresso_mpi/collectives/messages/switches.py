"""What the environment variables of a rank choose. A session refuses to start if its ranks differ in them."""

from __future__ import annotations

import os

from espresso_mpi.errors import ConfigError

SWITCH = "ESPRESSO_CUDA_AWARE"
EXECUTOR = "ESPRESSO_EXECUTOR"
_EXECUTORS = {"compiled": True, "python": False}
_WAYS = {"auto": None, "1": True, "0": False}


def by_tables() -> bool:
    """Whether tables of operations are used, as ``ESPRESSO_EXECUTOR`` has it: ``compiled``, the default, or ``python``.

    Raises:
        ConfigError: the environment variable is neither.
    """
    setting = os.environ.get(EXECUTOR, "compiled")
    if setting not in _EXECUTORS:
        raise ConfigError(f"{EXECUTOR}={setting!r}; expected compiled (as if unset) or python")
    return _EXECUTORS[setting]


def device_aware() -> bool | None:
    """Whether device pointers go to MPI, as ``ESPRESSO_CUDA_AWARE`` has it; None: as the probe finds.

    Raises:
        ConfigError: the environment variable is none of auto, 1 and 0.
    """
    setting = os.environ.get(SWITCH, "auto")
    if setting not in _WAYS:
        raise ConfigError(
            f"{SWITCH}={setting!r}; expected 1 (device pointers to MPI), 0 (staged by the host) or auto (what a probe "
            f"finds, as if unset)"
        )
    return _WAYS[setting]
