"""The transfer of bytes between ranks, and the start, the waits and the end of a session.

Messages and memory:

- ``transport``, ``connection``: send messages, with timeouts.
- ``host_messages``: messages of host memory, started and awaited by compiled code.
- ``gpu_messages``, ``gpu_calls``: messages of GPU memory.
- ``window``, ``window_kernels``, ``window_places``, ``shared_memory``: the shared window of a node, its collectives.
- ``shared_arrays``, ``large_sums``: arrays that all ranks of a node have mapped, and sums of large arrays.
- ``joint``, ``joint_sums``, ``joint_reads``, ``region_reads``: collectives of several arrays at once.
- ``single_copy``, ``cross_memory``, ``read_limit``: copies from and to the memory of other ranks of the node.
- ``compiled_calls``, ``mpi_calls``: the MPI functions for compiled code.
- ``mpi_reduction``: the operators of MPI.
- ``uncounted``: messages that only measure times.

Agreement:

- ``agreement``: small exchanges among all ranks.
- ``leader_gather``, ``node_leaders``, ``dissemination``: the same between nodes, in one compiled call.
- ``node_sums``: compiled: short sums over several nodes.
- ``agreed_nodes``: calls over several nodes that begin with the exchange of headers.
- ``part_sizes``: compares what ranks send to each other with what they expect.
- ``headers``, ``agreed``, ``agreed_copies``, ``agreed_sums``, ``sum_calls``: collectives that begin with the
  exchange of headers.
- ``choice``: which way of such a collective is the quickest.
- ``clocks``: offsets of the clocks of nodes.

Sessions:

- ``opening``, ``presence``, ``topology``, ``switches``: open a session.
- ``probe``, ``probe_program``: find out whether MPI takes device pointers.
- ``waiting``, ``naps``, ``deadlock``, ``roll_call``, ``failures``: handle waits and errors.
- ``lifetime``, ``leftovers``: close sessions.

May import: ``collectives.data`` and the layers below ``collectives``. A new wait must use ``waiting``, so that its
errors name the missing rank.
"""
