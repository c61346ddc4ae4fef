"""Compression methods. Each is one module with one class, which other modules find by its name.

Methods:

- ``fp16``, ``bf16``: casts.
- ``int8``, ``int4``, ``int2``, ``fp8_e4m3``, ``fp8_e5m2``, ``bound``: quantisers with scales.
- ``qsgd``, ``natural``, ``natural_dithering``, ``terngrad``: stochastic quantisers.
- ``onebit``, ``onebit_sgd``, ``signsgd``, ``signum``: signs.
- ``topk``, ``topk_sampled``, ``topk_chunked``, ``topk_in_chunks``, ``threshold``, ``dgc``, ``randomk``, ``dct_topk``:
  sparsifiers.
- ``count_sketch``: a sketch.
- ``powersgd``, ``acpsgd``: low rank.
- ``drive``, ``eden``, ``thc``: rotations.

Shared modules:

- ``base``, ``optional``: the contract, and what a method can add to it.
- ``registry``, ``plugins``: find methods by name, in this package and in others.
- ``context``: keys, scratch memory, and the memory of a method.
- ``schedule``: parameters that change from step to step.
- ``checks``: checks of arrays and of parameters.
- ``limit``: the largest magnitude.
- ``staging``: takes GPU arrays through host memory.
- ``by_address``: kernels that compiled code calls.
- ``kept``: stores the elements of largest magnitude; other methods compress their values.
- ``families``: classes that several methods share.
- ``kernels``: the kernels for CPU and GPU.

May import: ``arrays``, ``types`` and the layers below them; no collective, no session, no MPI. To add a method, write
one module with a class under ``@register``.
"""

from .base import Compressor
from .context import Context, Summary
from .limit import LIMIT
from .registry import get, names, read_specs, register, unregister
from .schedule import ParameterSchedule

__all__ = [
    "LIMIT",
    "Compressor",
    "Context",
    "ParameterSchedule",
    "Summary",
    "get",
    "names",
    "read_specs",
    "register",
    "unregister",
]
