"""Compression methods: one file each, one contract (``base``), found by name (``registry``), in this package
and in others (``plugins``).

Methods stand in this folder; classes that several share in ``families``, kernels in ``kernels``. ``optional`` has what
a method can add to the contract; ``context`` keys, scratch memory and what a method keeps; ``schedule`` parameters that
change from step to step; ``checks`` those of arrays and parameters; ``staging`` the way of GPU arrays through the host;
``kept`` how the elements of largest magnitude are stored, by other methods for the values.

May import: ``arrays``, ``types`` and what is below them; no collective, no session, no MPI. To add a method, write one
file with a class under ``@register``.
"""

from .base import LIMIT, Compressor
from .context import Context, Summary
from .registry import get, names, read_specs, register, unregister
from .schedule import ParameterSchedule

__all__ = [
    "LIMIT",
    "Compressor",
    "Context",
    "ParameterSchedule",
    "Summary",
    "get",
    "names",
    "read_specs",
    "register",
    "unregister",
]
