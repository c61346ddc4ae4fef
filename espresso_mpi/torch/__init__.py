"""PyTorch programs: gradients that are averaged during the backward pass, with or without DDP.

>>> import espresso_mpi.torch                                                      # doctest: +SKIP
>>> sync = espresso_mpi.torch.GradientSync(model, compressor="int8")               # without DDP  # doctest: +SKIP
>>> ddp.register_comm_hook(session, espresso_mpi.torch.ddp_hook)                   # with DDP  # doctest: +SKIP
>>> sync = espresso_mpi.torch.ShardSync(model, compressor="int8")                  # with FSDP2  # doctest: +SKIP

- ``gradient_sync``, ``overlap``, ``names``, ``hooks``: gradients without DDP.
- ``ddp``, ``accelerated``, ``lightning``: DDP, Hugging Face accelerate, and Lightning.
- ``shard_sync``: FSDP2.
- ``process_group``, ``groups``, ``work``, ``futures``, ``monitored_barrier``, ``sparse``, ``untraced``: the process
  group ``"espresso"``.
- ``onebit_adam``, ``onebit_lamb``, ``zero_one_adam``, ``momentum_sgd``, ``demo``, ``synchronised``, ``clan``,
  ``diloco``: the optimizers of ``espresso_mpi.optim`` as optimizers of torch.
- ``optimizer_states``: copies and saved states of these.
- ``replicas``: parameters and buffers that must be equal on all ranks.
- ``loss_scale``: residuals in the scale of a ``GradScaler``.
- ``states``: states of sessions as torch tensors.
- ``advice``: warns of compressors that do not train with an optimizer.

May import: the public names of ``espresso_mpi``, and PyTorch. No other folder imports PyTorch, except benchmarks. A new
adapter is a module of its own.
"""

from __future__ import annotations

from . import process_group
from .accelerated import hook_accelerator
from .clan import Clan
from .ddp import ddp_hook
from .demo import DeMo
from .diloco import DiLoCo
from .gradient_sync import GradientSync
from .groups import group_session
from .hooks import push_hook
from .loss_scale import follow_scaler
from .momentum_sgd import MomentumSGD
from .onebit_adam import OnebitAdam
from .onebit_lamb import OnebitLamb
from .replicas import average_buffers, broadcast_module, check_replicas
from .shard_sync import ShardSync
from .states import from_tensors, to_tensors
from .zero_one_adam import ZeroOneAdam

process_group.register()

__all__ = [
    "Clan",
    "DeMo",
    "DiLoCo",
    "GradientSync",
    "MomentumSGD",
    "OnebitAdam",
    "OnebitLamb",
    "ShardSync",
    "ZeroOneAdam",
    "average_buffers",
    "broadcast_module",
    "check_replicas",
    "ddp_hook",
    "follow_scaler",
    "from_tensors",
    "group_session",
    "hook_accelerator",
    "push_hook",
    "to_tensors",
]
