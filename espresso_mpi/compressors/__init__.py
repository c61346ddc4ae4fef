"""Compression methods: one file each, one contract (``base``), found by name (``registry``)."""

from .base import Compressor
from .registry import get, names, register, spellings

__all__ = ["Compressor", "get", "names", "register", "spellings"]
