"""Code that the benchmarks share.

- ``suite``: checks files before, shows progress, prints and writes the results.
- ``columns``: prints and writes the tables of all suites.
- ``checks``: makes the inputs of collectives, and counts wrong elements of their results.
- ``timing``: times methods in turns. The slowest rank counts.
- ``measuring``: checks and times methods, and counts their bytes.
- ``rows``: the results of a method.
- ``kernels``: the processor time of encodes and decodes alone.
- ``cores``: how far apart the cores of two ranks are.
- ``memory``: refuses sizes that do not fit into the memory of the nodes.
- ``resuming``: saves results after every run, so that a later call continues there.
- ``replicas``: code for benchmarks that train a model on every rank.

May import: everything below ``bench``, and ``bench.reference``. Code comes here when a second suite needs it. A suite
names its methods and lists its columns.
"""
