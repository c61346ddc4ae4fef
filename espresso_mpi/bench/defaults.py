"""Defaults of the suites: their functions ``main`` and the commands that call them have them from here.

Nothing is loaded for them, so that ``--help`` needs neither numba nor MPI.
"""

from __future__ import annotations


class Sync:
    """``bench sync``."""

    sizes = "64KiB,1MiB,16MiB"
    compressors = "none,fp16,int8,int4,onebit,topk:ratio=0.01,powersgd:rank=4"
    repeats = 20


class Collectives:
    """``bench collectives``."""

    collectives = "all"
    sizes = "8B-256MiB"
    factor = 4
    dtype = "float32"
    op = "sum"
    compressors = "fp16,int8,int4,onebit,topk:ratio=0.01"
    repeats = 20
    seconds = 2.0


class Routes:
    """``bench routes``."""

    sizes = "1MiB,64MiB"
    compressors = "none,fp16,bf16,int8,int4,onebit,topk:ratio=0.01,randomk:ratio=0.01,powersgd"
    repeats = 20
    data = "normal"


class Tensors:
    """``bench tensors``."""

    compressors = "none,fp16,int8,onebit"
    repeats = 10


class Overlap:
    """``bench overlap``."""

    compressors = "none,int8,onebit"
    repeats = 10


class Scaling:
    """``bench scaling``."""

    sizes = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
    compressors = "none,int8,onebit"
    rank_limit = "16MiB"
    repeats = 15


class Validate:
    """``bench validate``."""

    compressors = "fp16,int8,onebit,topk:ratio=0.01"
    tensors = "5,60"
    calls = "sync,push"
    batch = 512
    seconds = 80.0
    profile_seconds = 40.0


class Warmup:
    """``warmup``."""

    compressors = "none,fp16,int8,int4,onebit"


class GpuCheck:
    """``gpu-check``."""

    only = "kernels,speeds,beside,pointers,ranks,sanitizer"


class Compressors:
    """``bench compressors``."""

    device = "cpu"
    methods = "all"
    threads = "1"
    repeats = 15


class Train:
    """``bench train``."""

    methods = "none,fp16,int8,onebit,topk:ratio=0.01"
    steps = 1500
    hidden = 256
    momentum = 0.0
    seed = 0
    ablation = True


class Torch:
    """``bench torch``."""

    methods = (
        "alone,gloo:none,gloo:fp16,gloo:powersgd:rank=4,ddp:none,ddp:fp16,ddp:int8,ddp:onebit,ddp:powersgd:rank=4,"
        "ddp:topk,push:none,push:fp16,push:int8,push:int4,push:onebit,sync:none,sync:fp16,sync:int8,sync:int4,"
        "sync:onebit,sync:powersgd:rank=4,sync:topk,gradsync:none,gradsync:fp16,gradsync:int8,gradsync:int4,"
        "gradsync:onebit,plain:none,plain:fp16,plain:int8,gradsync:auto,gradsync:auto=int4+onebit"
    )
    batch = 4
    width = 256
    layers = 4
    repeats = 15


class Optimizers:
    """``bench optimizers``."""

    methods = "none,fp16,bf16,int8,int4,powersgd:rank=4,topk:ratio=0.01,dgc:ratio=0.25~0.01@50,onebit"
    without_feedback = "onebit"
    optimizer = "adamw,sgd"
    seeds = "0"
    steps = 200


class Accuracy:
    """``bench accuracy``: three parts of the ways, the second for workloads under AdamW, and the rest."""

    workload = "gpt"
    gradients = (
        "gloo:none,gloo:fp16,gloo:powersgd:rank=4,gradsync:none,gradsync:fp16,gradsync:int8,gradsync:int4,"
        "gradsync:onebit,gradsync:topk:ratio=0.01,gradsync:powersgd:rank=4,ef21:int4"
    )
    momenta = "onebit-adam,onebit-adam:int2,onebit-adam+update_clip=1,onebit-lamb,zero-one-adam,clan,muloco"
    local = "diloco,streaming,sparseloco,demo,gradsync:auto"
    seeds = "0,1,2"
    steps = 300
    tolerance = 0.5
    repeats = 40


class Fidelity:
    """``bench fidelity``."""

    compressors = "fp16,bf16,int8,int4,fp8_e4m3,natural,int2,powersgd:rank=4,eden,onebit,topk:ratio=0.1,topk:ratio=0.01"
    seeds = "0,1"
    steps = 250


class Profile:
    """``espresso-mpi profile``, which fits the planner's curves."""

    output = "profile.json"
    compressors = "fp16,int8,onebit,topk:ratio=0.01"
    seconds = 60.0
