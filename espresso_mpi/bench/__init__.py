"""Benchmarks. Each suite is one module; ``report`` writes BENCHMARKS.md from the results of all.

Suites, each with the modules that belong to it:

- ``sync``, ``sync_tables``: one array, every compressor, beside ``MPI_Allreduce``.
- ``tensors``: all gradients of a network in one ``sync``.
- ``overlap``, ``deep``: gradients that travel during the backward pass of a deep model.
- ``scaling``: sizes of arrays and numbers of ranks.
- ``routes``, ``gradient_inputs``: every named route, with normal values or the gradients of a training.
- ``collectives``, ``collective_cases``, ``collective_tables``, ``compressed_cases``: all collectives, dense and
  compressed.
- ``compressors``, ``compressor_tables``, ``memory``: time and memory traffic of every method.
- ``train``, ``train_tables``, ``training``, ``loss_curves``, ``model``, ``text``: loss, time and bytes of training
  runs.
- ``optimizers``, ``optimizer_runs``, ``optimizer_tables``, ``optimizer_ways``, ``gpt_shape``: losses under AdamW,
  momentum SGD and the optimizers of ``espresso_mpi.optim``.
- ``accuracy``, ``accuracy_runs``, ``accuracy_tables``, ``accuracy_times``, ``accuracy_ways``, ``workloads``: seconds
  and megabytes to a target loss.
- ``fidelity``: the measure of ``plan="auto"`` for gradients, beside losses.
- ``torch_steps``, ``torch_ways``: training steps in PyTorch, beside DDP over gloo.
- ``validate``, ``validate_tables``: predictions of the planner beside measured steps.
- ``planner``: the decisions of the planner.
- ``gpu``: the checks of ``gpu-check``.

Shared modules:

- ``harness``: inputs, checks, timing, rows and tables.
- ``defaults``: the defaults of the suites and of their commands.
- ``reference``, ``bound``, ``mpi_own``: the right result, the least possible time, and the best result of MPI alone.
- ``datasets``, ``gpt``, ``networks``, ``replica``, ``averaging``, ``session_options``: data, models in PyTorch, what
  averages their gradients, and with which options.
- ``blas``, ``python_beside``, ``plain_sockets``: threads of matrix products, Python beside communication, and what
  moves bytes only.
- ``ticks``, ``plots``: progress bars, and pictures.
- ``report``, ``report_texts``, ``medians``, ``kept_sections``, ``wrapping``: the report, its texts, several runs as
  one, the sections that it keeps, and the width of its lines.

May import: everything but ``cli``. To add a suite, write a module with a function ``main`` and a table of columns, its
defaults, a command in ``cli.measuring``, and a section in ``report``.
"""
