"""What the environment variables of a rank choose. A session refuses to start if its ranks differ in them."""

from __future__ import annotations

import os

from espresso_mpi.errors import ConfigError

SWITCH = "ESPRESSO_CUDA_AWARE"
EXECUTOR = "ESPRESSO_EXECUTOR"
SINGLE_COPY = "ESPRESSO_SINGLE_COPY"
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


def single_copy() -> bool:
    """Whether ranks of a node may read each other's memory, as ``ESPRESSO_SINGLE_COPY`` has it: 1, the default, or 0.

    Raises:
        ConfigError: the environment variable is neither.
    """
    setting = os.environ.get(SINGLE_COPY, "1")
    if setting not in ("0", "1"):
        raise ConfigError(f"{SINGLE_COPY}={setting!r}; expected 1 (where the system allows it, as if unset) or 0")
    return setting == "1"
