"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

FOREGROUND = 20e-6, 1 / 64, 0.2e-3
"""Of naps of a thread that waits for a call: the shortest in seconds, the length as a share of the wait so far, and the
longest in seconds. Each poll takes 10 us or more of a core."""

BACKGROUND = 100e-6, 1 / 4, 1e-3
"""The same beside threads that compute, which each nap interrupts. With (20 us, 1/8, 1 ms), a step of 314 pushes at 1
Gbit/s made 9000 to 12,000 naps in 2.3 s, which took a fifth of the thread's time; with these 4000, in 2.1 s."""

AT_BARRIER = 20e-6
"""Seconds of all naps at a barrier of a node in the background: no network is involved."""
