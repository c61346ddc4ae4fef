"""The compiled executor: the steps of a segment or of a payload bucket as a table of operations.

- ``operations``: describes a table.
- ``building``, ``segments``, ``emission``: make a table from the steps of a program.
- ``passes``: joins steps on the same elements into one pass over memory.
- ``exchanges``, ``summing``, ``row_kernels``: dense collectives by messages; sums of payloads and of summaries.
- ``early``: lets messages leave before a payload is complete.
- ``interpreter``: the function without the GIL that runs a table.
- ``running``: runs a table in progress steps.
- ``one_call``, ``piggyback``: run a small call that is made again, together with the exchange of headers.
- ``small_calls``: chooses among the ways of such calls.
- ``node_call``, ``gathered``: the same where each rank is alone on its node.
- ``expected_call``, ``expected``, ``expecting``: the same on several nodes, for calls that all ranks expect.
- ``describing``: the table for ranks that are only described.

May import: the modules of ``collectives`` that a segment needs, and the layers below them; no module that runs
programs. A new kind of operation gets a code and a text in ``operations``, a branch in ``interpreter``, and a method in
``building`` or ``summing``.
"""
