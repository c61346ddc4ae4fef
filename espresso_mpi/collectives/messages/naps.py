"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

FOREGROUND = 20e-6, 1 / 64, 0.2e-3
"""Of naps of a thread that waits for a call: the shortest in seconds, the length as a share of the wait so far, and the
longest in seconds. Each poll takes 10 us or more of a core."""

BACKGROUND = 100e-6, 1 / 2, 4e-3
"""The same beside threads that compute, which the end of each nap interrupts. Compiled code takes the share of the
usual wait, where that is longer than the wait so far. In a step of 314 pushes of int8 at 1 Gbit/s, a rank woke up 1100
times where naps grew from 100 us to 1 ms, and wakes up 450 times now: 60 ms less of 640 ms of processor time."""

LONG = 16e-3
"""Seconds of the longest wait that counts for the usual one: a rank that comes late is not usual."""

AT_BARRIER = 20e-6
"""Seconds of all naps at a barrier of a node in the background: no network is involved."""
