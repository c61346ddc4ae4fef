"""``gpu-check``: tests on the GPU of this node what the GPU support promises.

- ``suite``: runs the parts, and gives one result for each promise.
- ``kernels``: compares the GPU kernels with the CPU kernels.
- ``beside``: times the kernels beside other work.
- ``ranks``: the program of two ranks on one GPU.
- ``report``: writes the results.
- ``pictures``: draws them.

May import: everything below ``bench``. To add a check, write it in the module of its part, and call it in ``suite``.
"""
