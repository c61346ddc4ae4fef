"""From the calls of user threads to collectives that all ranks run in the same order.

``intake`` turns arguments into ``calls``. In ``negotiation``, the ranks learn of each other's calls. ``engine`` makes
progress steps, and ``driver`` decides which thread makes them. ``dispatcher`` splits calls into segments. ``batches``,
``fusion`` and ``pending_groups`` decide which tensors share a buffer, ``payload_buckets`` which share messages. By the
``fast_path``, data are piggybacked on the headers of a round, as many as the ``piggyback_limit`` allows;
``measured_limits`` keeps what is measured. ``nonfinite`` handles values that cannot be summed. ``diagnostics`` words
the errors that all ranks raise. ``guard`` finds tensors that change while they are in flight. ``plan_change`` moves
residuals when the plan changes.

May import: ``state``, ``options``, ``collectives`` and what is below them. Whatever ranks have to agree on belongs into
a negotiation round, never into a collective of its own.
"""
