"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

FOREGROUND = 20e-6, 1 / 64, 0.2e-3
"""Of naps of a thread that waits for a call: the shortest in seconds, the length as a share of the wait so far, and the
longest in seconds. Each poll takes 10 us or more of a core."""

BACKGROUND = 100e-6, 1 / 4, 1e-3
"""The same in Python, while other threads of the process compute."""

COMPILED = 100e-6, 1 / 2, 4e-3
"""The same in compiled code. The share is that of the wait so far, or of the usual one if it is longer: the end of a
nap interrupts those that compute, and most messages are there after one or two naps of this length. In a step of 314
pushes of int8 at 1 Gbit/s, a rank wakes up 450 times, and 1100 times with naps as in Python; 60 ms of its 640 ms of
processor time are the difference."""

LONG = 16e-3
"""Seconds as which longer waits count for the usual one: a rank that comes late is not usual."""

AT_BARRIER = 20e-6
"""Seconds of all naps at a barrier of a node in the background: no network is involved."""
