"""What carries bytes between ranks, and how ranks meet, wait and part.

``transport`` sends messages, with staging and time-outs; ``window`` and ``shared_memory`` are the way inside a node;
``agreement`` and ``clocks`` are small exchanges; ``probe`` finds out whether MPI takes device pointers. ``opening``,
``presence``, ``topology``, ``lifetime``, ``leftovers``, ``standstill``, ``waiting`` and ``failures`` are how sessions
begin, end, wait and fail.

May import: ``collectives.data`` and what is below ``collectives``. Whoever waits here must do so by ``waiting``, so
that a missing rank is named.
"""
