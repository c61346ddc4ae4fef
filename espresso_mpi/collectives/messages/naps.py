"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

NAP = 20e-6
"""Seconds of the shortest nap: each poll takes 10 us or more of a core."""

NAPS = ((NAP, 1 / 64, 0.2e-3), (100e-6, 1 / 4, 1e-3))
"""Naps of a thread that waits for other ranks: the shortest in seconds, the length as a share of the wait so far, and
the longest in seconds; then those in the background. There, each nap interrupts other threads that compute: with 20 us
at least and 1/8 of the wait, a step of 314 pushes at 1 Gbit/s made 9000 to 12,000 naps in 2.3 s, which took a fifth of
the time of the thread; with these, 4000 in 2.1 s."""
