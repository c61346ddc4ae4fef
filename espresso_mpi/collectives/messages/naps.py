"""How long a thread naps that waits for other ranks: in Python, and in compiled code."""

from __future__ import annotations

YIELDS = 50
"""Polls between which a thread gives the core away by yielding, before it naps."""

FOREGROUND = 20e-6, 1 / 64, 0.2e-3
"""Of naps of a thread that waits for a call: the shortest in seconds, the length as a share of the wait so far, and the
longest in seconds. Each poll takes 10 us or more of a core."""

BACKGROUND = 100e-6, 1 / 4, 1e-3
"""The same in Python, while other threads of the process compute."""

COMPILED = 100e-6, 1 / 2, 2e-3
"""The same in compiled code. The end of a nap interrupts those that compute: in a step of 314 pushes of int8 at 1
Gbit/s, a rank wakes up 650 times, and 1100 times with naps as in Python, which takes 30 of 640 ms of processor time
more. Longer naps at the beginning of a wait (half of the usual wait) hide more of such a step, but delay the handshakes
of large messages where the network is the limit: a step of a GPT by int4 at 100 Mbit/s then took 7 % longer."""

AT_BARRIER = 20e-6
"""Seconds of all naps at a barrier of a node in the background: no network is involved."""
