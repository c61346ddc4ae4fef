"""Compresses what FSDP2 sends: the reduce-scatter of gradients, the allgather of weights, the mean over replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import distributed

from ..errors import ConfigError, GradientError
from ..session import Session
from . import advice, names
from .groups import group_session, ranks_of
from .loss_scale import follow
from .states import KeepsState
from .work import done

_OPS: dict[str, Literal["mean", "sum"]] = {"AVG": "mean", "SUM": "sum"}


class ShardSync(KeepsState):
    """Compresses the gradients of a model that ``torch.distributed.fsdp.fully_shard`` has sharded.

    The loop stays as it is. Each backward pass reduces the gradients of each FSDP module by
    ``Session.reduce_scatter``, with the session's compressor and feedback. Residuals are kept under the names of the
    parameters that travel together. Call it after ``fully_shard`` and before the first step, on all ranks.

    Args:
        model: with FSDP modules in it. A parameter that a rank did not use has a gradient of zero, because parameters
            that come and go would need other residuals; with ``compressor="none"`` it has none, as without this.
        session: over the ranks that share the parameters, in the order of their process group; default: a new one from
            ``options``, which ``close`` closes.
        weights: spec of a compressor for the weights: ranks send by how much theirs differ from what they last sent.
            Every rank then keeps a copy of all weights, and the backward pass needs no second allgather. Default:
            dense, by the process group.
        replicas: a session over the ranks with the same part of the parameters (hybrid sharding): gradients are
            averaged over them as well, with the compressor and feedback of that session. Shard the model over the
            sharding dimension of the mesh alone then.
        options: of the new session, as for ``espresso_mpi.Session``.

    Raises:
        ConfigError: ``session`` and ``options`` are given, nothing is sharded, or the session has a plan.

    Example:
        >>> fully_shard(model)  # doctest: +SKIP
        >>> sync = espresso_mpi.torch.ShardSync(model, compressor="int8")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: torch.nn.Module,
        session: Session | None = None,
        *,
        weights: str = "none",
        replicas: Session | None = None,
        **options: Any,
    ) -> None:
        if session is not None and options:
            raise ConfigError(
                f"ShardSync: got a session and also {', '.join(options)}; pass these to Session, or no session"
            )
        groups = list(_groups(model))
        if not groups:
            raise ConfigError(
                f"ShardSync: {type(model).__name__} has no sharded module; call fully_shard(model) before"
            )
        self._owns = session is None
        self.session = group_session(_process_group(groups[0][1]), **options) if session is None else session
        if replicas is not None:
            _require_one_dimension(groups[0][1])
        for given in (self.session, replicas):
            if given is not None and given.compressor is None:
                raise ConfigError("ShardSync: the session has a plan, which knows no sharded tensors; pass compressor=")
        self._gathers = []
        ranks = ranks_of(self.session)
        for module, group in groups:
            parts = _Parts(model, group, self.session, ranks)
            module.set_custom_reduce_scatter(_CompressedReduceScatter(parts))
            if self.session.compressor != "none":
                module.set_reduce_scatter_unused_params(True, recurse=False)
            if weights != "none":
                gather = _DifferencesAllGather(parts, weights)
                module.set_custom_all_gather(gather)
                self._gathers.append(gather)
            if replicas is not None:
                module.set_all_reduce_hook(_mean_over(replicas, parts))
        advice.watch(self.session, model.parameters(), sharded=True)

    def reset_weights(self) -> None:
        """Send all weights as they are the next time; after weights were loaded or changed by hand."""
        for gather in self._gathers:
            gather.known = None


class _Parts:
    """The parameters that travel together, and the session that they travel by."""

    def __init__(self, model: torch.nn.Module, group: Any, session: Session, ranks: list[int]) -> None:
        self.session, self._group, self._ranks = session, group, ranks
        prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        infos = [parameter._module_info for parameter in group.fsdp_params]
        self._names = [f"{prefixes.get(id(i.module), '')}.{i.param_name}".lstrip(".") for i in infos]
        for info, name in zip(infos, self._names):
            names.take(session, name, info.module)

    def require(self, group: Any, tensor: torch.Tensor) -> None:
        """Refuse a process group other than that of the session."""
        ranks = distributed.get_process_group_ranks(group)
        if ranks != self._ranks:
            raise ConfigError(
                f"ShardSync: {self._names[0]} is sharded over the ranks {ranks}, but the session is over "
                f"{self._ranks}; open it by espresso_mpi.torch.group_session(mesh.get_group(...)), and give modules on "
                f"other meshes a ShardSync of their own"
            )
        if not tensor.is_floating_point():
            raise ConfigError(
                f"ShardSync: the weights with {self._names[0]} travel as bytes, since their types differ; give all "
                f"parameters of a module one type, or leave out weights="
            )

    def how(self, session: Session, elements: int) -> dict[str, Any]:
        """How a session compresses gradients of so many elements."""
        if session.compressor == "none":
            return {}
        return {"compressor": session.compressor, "feedback": session.feedback, "name": self._name(elements)}

    def _name(self, elements: int) -> str:
        """The name of the gradients that travel now, which are those of so many elements.

        Raises:
            GradientError: of a part of them there is no gradient, so their residuals cannot be told.
        """
        going = [(p, name) for p, name in zip(self._group.fsdp_params, self._names) if p.sharded_param.requires_grad]
        expected = sum(p.padded_sharded_param_size.numel() for p, _ in going) * len(self._ranks)
        if elements != expected:
            raise GradientError(
                f"ShardSync: gradients of {elements} elements, expected {expected} for all of {self._names}; leave "
                f"set_reduce_scatter_unused_params(True), which ShardSync has called, as it is"
            )
        every = [name for _, name in going]
        return every[0] if len(every) == 1 else f"{every[0]}..{every[-1]} {zlib.crc32(repr(every).encode()):08x}"


class _Allocating:
    """How FSDP2 gets memory for what it sends."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CompressedReduceScatter(_Allocating):
    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        parts = self._parts
        parts.require(group, input_tensor)
        how = parts.how(parts.session, input_tensor.numel())
        follow(parts.session)
        parts.session.reduce_scatter(input_tensor, _op(op), out=output_tensor, **how)
        return done([output_tensor]) if async_op else None


class _DifferencesAllGather(_Allocating):
    """Every rank sends by how much its weights differ from what the others know of them."""

    def __init__(self, parts: _Parts, compressor: str) -> None:
        self._parts, self._compressor = parts, compressor
        self.known: torch.Tensor | None = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        parts, known = self._parts, self.known
        parts.require(group, input_tensor)
        if known is None or known.shape != output_tensor.shape or known.dtype != output_tensor.dtype:
            self.known = known = parts.session.allgather(input_tensor.clone())
        elif torch._C._current_graph_task_id() == -1:  # a backward pass takes what the forward pass took
            n, rank = input_tensor.numel(), group.rank()
            change = input_tensor - known[rank * n : (rank + 1) * n]
            known += parts.session.allgather(change, compressor=self._compressor)
        output_tensor.copy_(known)
        return done([output_tensor]) if async_op else None


def _mean_over(replicas: Session, parts: _Parts) -> Any:
    def hook(reduced: torch.Tensor) -> None:
        elements = reduced.numel() * parts.session.topology.size
        follow(replicas)
        replicas.allreduce(reduced, **parts.how(replicas, elements))

    return hook


def _groups(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(FSDP module, its group of parameters)."""
    from torch.distributed.fsdp import FSDPModule  # takes a second, which other programs need not wait

    seen = set[int]()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if not hasattr(module, "set_reduce_scatter_unused_params"):
            raise ConfigError(f"ShardSync: torch {torch.__version__} has no hooks for this in FSDP2; use 2.13 or newer")
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1:
            raise ConfigError(
                f"ShardSync: the parameters of {type(module).__name__} are on several meshes; shard those of another "
                f"mesh as a module of their own"
            )
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield module, group


def _process_group(group: Any) -> Any:
    """Of the ranks over which a group of parameters is sharded."""
    return group.mesh_info.shard_process_group


def _require_one_dimension(group: Any) -> None:
    if getattr(group.mesh_info, "replicate_process_group", None) is not None:
        raise ConfigError(
            "ShardSync: replicas= for a model that FSDP2 itself averages over replicas; call fully_shard with the "
            "sharding dimension of the mesh alone, mesh['shard']"
        )


def _op(op: Any) -> Literal["mean", "sum"]:
    name = str(getattr(op, "op", op)).split(".")[-1].upper()
    if name not in _OPS:
        raise ConfigError(
            f"ShardSync: a reduction by {name}; expected AVG or SUM; leave out set_gradient_divide_factor, or scale "
            f"the loss instead"
        )
    return _OPS[name]
