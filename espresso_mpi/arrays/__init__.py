"""Arrays of every framework, and memory of every device.

- ``buffers``: adopts the arrays of other frameworks. Only this module, ``any_dtype`` and ``same_memory`` see them; all
  other modules see numpy arrays and numba's device arrays.
- ``any_dtype``: adopts arrays of every element type that MPI has.
- ``same_memory``: finds the memory of an array that comes again, as quickly as numpy finds that of its own arrays.
- ``device``: handles host memory and GPU memory by one set of functions.
- ``gpu_times``: tells how long a GPU takes, and when it has done something.
- ``addresses``: where the arrays of a call begin.
- ``caller_streams``: launches kernels on a stream of the caller's.
- ``driver``: calls the CUDA driver.
- ``workspace``: keeps scratch memory, so that no steady step allocates.

May import: ``types`` and the layers below it. To add a framework, teach ``buffers`` to adopt its arrays.
"""
