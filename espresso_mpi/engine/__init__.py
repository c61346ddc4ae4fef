"""Calls from threads become messages that all ranks agree on.

``calls`` are what was handed over; in ``negotiation`` ranks learn of each other's; ``engine`` has the turns and
``driver`` the thread that takes them; ``dispatcher`` makes segments of calls. ``batches``, ``fusion`` and ``parking``
say which tensors travel together; ``fast_path`` is the short way of small tensors; ``nonfinite`` is about values that
cannot be summed; ``diagnostics`` words the errors that all ranks raise; ``guard`` finds tensors that change on their
way; ``handover`` is what tensors are owed when plans change.

May import: ``state``, ``options``, ``collectives`` and what is below them. What ranks have to agree on belongs into a
round of ``negotiation``, never into a collective of its own.
"""
