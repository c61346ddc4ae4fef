"""Arrays of every framework, and memory of every device.

``buffers`` adopts foreign arrays; ``same_memory`` finds the memory of those that come again, and no other module sees
a framework's array; ``device`` is host and GPU memory behind one set of functions; ``workspace`` keeps scratch memory.

May import: ``types`` and what is below it. To add a framework, teach ``buffers`` to adopt its arrays; everything else
sees numpy arrays and numba's device arrays only.
"""
