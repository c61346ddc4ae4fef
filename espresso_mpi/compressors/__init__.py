"""Compression methods: one file each, one contract (``base``), found by name (``registry``)."""

from .base import LIMIT, Compressor
from .context import Context, Summary
from .registry import get, names, register, spellings, unregister
from .schedule import Schedule

__all__ = [
    "LIMIT",
    "Compressor",
    "Context",
    "Schedule",
    "Summary",
    "get",
    "names",
    "register",
    "spellings",
    "unregister",
]
