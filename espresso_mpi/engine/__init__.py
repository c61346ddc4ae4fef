"""From the calls of user threads to collectives that all ranks run in the same order.

Calls:

- ``intake``, ``calls``, ``inbox``: turn arguments into pending calls, and hold them until they are announced.
- ``negotiation``, ``call_failures``, ``rounds``: rounds in which the ranks learn which calls the others have made.
- ``latest_sum``: makes the latest dense sum again, with fewer checks.
- ``sync_again``: makes a ``sync`` of compressed arrays, or of several dense ones, again.
- ``expectation``: which call the ranks expect next.
- ``announced_sizes``: sizes of parts that differ between ranks, and whether they fit.
- ``lifecycle``, ``settling``: parts of the engine: calls come and end; what follows from a round.
- ``diagnostics``: the errors that all ranks raise.
- ``guard``: finds tensors that change while they are in flight.
- ``nonfinite``: handles values that cannot be summed.
- ``steady_calls``: repeats what was found out about a call that is made again.

Tensors that travel together:

- ``batches``, ``fusion``, ``pending_groups``: decide which tensors share a bucket, and fill it.
- ``payload_buckets``: decides which compressed tensors share messages.
- ``dense_steps``: sends the first steps of a tensor dense.
- ``part_buffers``: the working arrays of reduce-scatter and allgather.
- ``jobs``, ``programs``: the steps of buckets, and their compiled routes.

Execution:

- ``engine``: makes progress steps.
- ``driver``: decides which thread makes them.
- ``dispatcher``: splits calls into segments.
- ``gpu_ends``: ends calls when the GPU has passed an event.
- ``fast_path``, ``piggybacking``, ``dense_piggyback``, ``table_piggyback``, ``piggyback_limit``: send data piggybacked
  on the header of a negotiation round.
- ``measured_limits``: keeps the sizes that a session measures.
- ``plan_change``: moves residuals when the plan changes.

May import: ``state``, ``options``, ``collectives`` and the layers below them. Whatever ranks must agree on belongs into
a negotiation round, never into a collective of its own.
"""
