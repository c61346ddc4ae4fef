"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

NAP = 20e-6
"""Seconds of the shortest nap: each poll takes 10 us or more of a core."""

NAPS = ((1 / 64, 0.2e-3), (1 / 8, 1e-3))
"""The length of a nap as a share of the wait so far, and its maximum in seconds; then those in the background."""
