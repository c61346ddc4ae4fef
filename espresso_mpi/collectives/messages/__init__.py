"""The transfer of bytes between ranks, and the start, waits and end of a session.

``transport`` sends messages, with timeouts; those of GPU memory by ``gpu_messages`` and ``gpu_calls``. ``window`` and
``shared_memory`` are the transport inside a node. ``agreement``, ``dissemination`` and ``clocks`` are small exchanges.
``probe`` tests whether MPI takes device pointers. ``opening``, ``presence``, ``topology``, ``lifetime`` and
``leftovers`` open and close sessions. ``waiting``, ``deadlock``, ``roll_call`` and ``failures`` handle waits and
errors.

May import: ``collectives.data`` and what is below ``collectives``. All waits must use ``waiting``, so that errors name
the missing rank.
"""
