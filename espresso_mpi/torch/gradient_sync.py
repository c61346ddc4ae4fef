"""Averages a module's gradients while the backward pass runs, without DDP."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch

from ..errors import ConfigError, EspressoError, GradientError, MismatchError
from ..optim.messages import wait_for
from ..session import Session
from ..sessions.handles import Handle
from . import advice, names
from .loss_scale import follow, follow_scaler, has_unscaled
from .overlap import TOGETHER, Groups, Overlap
from .replicas import broadcast_module
from .states import KeepsState

_AVERAGED = "_espresso_averaged"
"""An attribute of the gradients that ``wait`` has averaged: their version then."""


class GradientSync(KeepsState):
    """Pushes each gradient of a module as soon as the backward pass has accumulated it, small ones with neighbours.

    Call ``wait`` between the backward pass and whatever reads the gradients. If some ranks did not use a parameter, its
    gradient counts as zero there. If no rank used it, ``grad`` stays as it is.

    Args:
        module: parameters that require a gradient later than this are found by ``wait``. Names of parameters are those
            of ``module.named_parameters()``: the same on every rank.
        session: over the ranks; default: a new one from ``options``, which ``close`` closes.
        overlap: send gradients during the backward pass (True), or all at once in ``wait`` (False), with the same
            bits. The latter is quicker where ranks have no free core for communication, and where payloads are small.
            Default: the first 16 steps take turns, and the quicker way stays; with a plan, as the plan says
            (``Plan.held``): ``plan="auto"`` tries both.
        broadcast: copy the parameters and buffers of rank 0 to all ranks first.
        scaler: the ``torch.amp.GradScaler`` of the loop. When its scale changes, the session's residuals are scaled
            alike. The session must have ``nonfinite="skip_all"``, which is the default for a new one then.
        options: of the new session, as for ``espresso_mpi.Session``.

    Raises:
        ConfigError: ``session`` and ``options`` are given, the module has no parameter that requires a gradient, the
            session does not go with the scaler, or another model of it has parameters of the same names;
        MismatchError: the modules of the ranks differ; on every rank.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = espresso_mpi.torch.GradientSync(model, compressor="fp16")
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> sync.wait()
        >>> optimizer.step()
        >>> sync.close()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        session: Session | None = None,
        *,
        overlap: bool | Literal["auto"] = "auto",
        broadcast: bool = True,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        if session is not None and options:
            raise ConfigError(
                f"GradientSync: got a session and also {', '.join(options)}; pass these to Session, or no session"
            )
        if scaler is not None:
            options = {"nonfinite": "skip_all", **options}
        self._owns = session is None
        self.session = Session(**options) if session is None else session
        if scaler is not None:
            follow_scaler(self.session, scaler)
        self._module, self._scaler, self._overlap = module, scaler, Overlap(overlap, self.session)
        self._paused = self._begun = self._closed = False
        self._ready: set[str] = set()
        self._accumulated_since = set[str]()
        self._handles: list[Handle] = []
        self._sent: set[tuple[str, ...]] = set()
        self._alone, self._together = Groups(0), Groups(TOGETHER)
        self._hooked: dict[str, tuple[torch.nn.Parameter, Any]] = {}
        if not any(p.requires_grad for p in module.parameters()):
            raise ConfigError(f"GradientSync: {type(module).__name__} has no parameter that requires a gradient")
        sharded = next((name for name, p in module.named_parameters() if type(p).__name__ == "DTensor"), None)
        if sharded is not None:
            raise ConfigError(
                f"GradientSync: {sharded} is a DTensor, of which each rank has a part; use ShardSync for modules that "
                f"fully_shard has sharded"
            )
        if broadcast:
            broadcast_module(module, self.session)
        self._hook_new()
        advice.watch(self.session, module.parameters())

    @property
    def overlaps(self) -> bool | None:
        """Whether gradients are sent during the backward pass; None while the first steps find out what is quicker.

        Example:
            >>> sync = espresso_mpi.torch.GradientSync(torch.nn.Linear(3, 2), overlap=False)
            >>> sync.overlaps
            False
            >>> sync.close()
        """
        return self._overlap.now if self._overlap.settled else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of this with-block only accumulate; the next one after it sends the sums."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def wait(self) -> None:
        """Wait until all gradients of this step are the means over the ranks. Every rank must call it once a step.

        Raises:
            GradientError: the scaler has unscaled the gradients already; others as ``Session.wait_all``.
        """
        if self._closed:
            raise ConfigError("wait: this GradientSync was closed; make a new one, and remove what attach() returned")
        try:
            self._require_scaled()
            self._begin()
            self._hook_new()
            self._push_rest()
            if self._overlap.now:
                wait_for(self._handles)
            else:
                self.session.sync({name: self._hooked[name][0].grad for name in sorted(self._ready)})
            for grad in (self._hooked[name][0].grad for name in self._ready):
                if grad is not None:
                    setattr(grad, _AVERAGED, grad._version)
        except EspressoError:
            with suppress(EspressoError):  # no gradient is under way any more
                wait_for(self._handles)
            raise
        finally:  # whatever failed, the next backward pass begins a step
            self._ready, self._begun, self._handles = set(), False, []
            self._sent.clear()
            self._accumulated_since.clear()
        self._overlap.step_ended()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Let ``optimizer.step()`` call ``wait`` first; for loops that read gradients nowhere else.

        With ``optimizer.step(closure)``, it is called after the closure, each time. All ranks must call the closure
        equally often: for a search along a line, it has to return the mean loss of the ranks.

        Returns:
            torch's handle, whose ``remove()`` undoes it.
        """
        if self._scaler is not None:
            raise ConfigError("attach: scaler.unscale_() and scaler.step() read gradients before step(); call wait()")
        return optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Wait now, or after the closure that the optimizer is given, which computes the gradients."""
        own, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self.wait()
            return None

        def averaging() -> Any:
            loss = closure()
            self.wait()
            return loss

        return ((own, averaging, *rest[1:]), kwargs) if rest else (args, {**kwargs, "closure": averaging})

    def close(self) -> None:
        """Remove the hooks, and close the session if this opened it. Collective then."""
        for name, (parameter, hook) in self._hooked.items():
            hook.remove()
            names.free(self.session, name, parameter)
        self._hooked, self._closed = {}, True
        super().close()

    # --- the state ----------------------------------------------------------------------------------------------------

    # --- one step -----------------------------------------------------------------------------------------------------

    def _hook_new(self) -> None:
        """Hook the parameters that require a gradient and have no hook."""
        new = list[tuple[str, int]]()
        for name, parameter in self._module.named_parameters():
            known = self._hooked.get(name)
            if parameter.requires_grad and (known is None or known[0] is not parameter):
                if known is None:
                    new.append((name, parameter.numel() * parameter.element_size()))
                else:
                    known[1].remove()
                    names.free(self.session, name, known[0])
                names.take(self.session, name, parameter)
                self._hooked[name] = parameter, parameter.register_post_accumulate_grad_hook(self._hook(name))
        if new:
            self._alone.add(new)
            self._together.add(new)

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook of a parameter. It does not keep this alive: Python cannot free a cycle through a hook of torch."""
        own = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            sync = own()
            if sync is None:
                raise GradientError(
                    f"{name}: its GradientSync is gone, so nothing averages its gradient; keep the GradientSync as "
                    f"long as the model trains, or close() it first"
                )
            sync._accumulated(name)

        return hook

    def _accumulated(self, name: str) -> None:
        self._accumulated_since.add(name)
        if self._paused:
            return
        if name in self._ready:
            raise GradientError(
                f"{name}: a second gradient was accumulated while the first is on its way; call wait() after the "
                f"backward pass of each step, before zero_grad(), and put the backward passes that only accumulate "
                f"into 'with sync.no_sync():'"
            )
        self._begin()
        self._ready.add(name)
        if self._overlap.now:
            group = self._groups.of(name)
            if all(one in self._ready or not self._hooked[one][0].requires_grad for one in group):
                self._push(group)

    @property
    def _groups(self) -> Groups:
        """The gradients that this step pushes by one call."""
        return self._alone if self._overlap.singly else self._together

    def _push(self, names: tuple[str, ...]) -> None:
        """Start to send those of a group's gradients that are ready."""
        self._sent.add(names)
        grads = {name: self._hooked[name][0].grad for name in names if name in self._ready}
        self._handles.append(self.session.push_together(grads))

    def _begin(self) -> None:
        """Once a step, before its first push: decide how it travels, and bring residuals to the scale of gradients."""
        if self._begun:
            return
        self._begun = True
        self.session.begin_step(self._hooked)
        self._overlap.begin()
        follow(self.session)

    def _require_scaled(self) -> None:
        if self._scaler is not None and has_unscaled(self.session, (p for p, _ in self._hooked.values())):
            raise GradientError(
                "wait: scaler.unscale_() came before wait(), so the scaler has not seen the gradients that travel, and "
                "the replicas would diverge; call wait() before scaler.unscale_() and scaler.step()"
            )

    def _push_rest(self) -> None:
        """Push what this backward pass had no gradient of and the one of another rank, or an earlier one here, had."""
        rest = {name: p for name, (p, _) in self._hooked.items() if p.requires_grad}
        used = np.array([name in self._ready or self._is_new(name, p.grad) for name, p in rest.items()], np.uint8)
        try:
            self.session.allreduce(used, op="max", name="GradientSync.used")
        except MismatchError as error:
            raise MismatchError(
                f"wait: {error}; if they bring as many elements as parameters that require a gradient ({used.size} "
                f"here), freeze the same parameters on every rank"
            ) from error
        for (name, parameter), somewhere in zip(rest.items(), used):
            if name in self._ready or not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._ready.add(name)
        for group in self._groups.all() if self._overlap.now else ():  # in the same order on every rank
            if group not in self._sent and not self._ready.isdisjoint(group):
                self._push(group)

    def _is_new(self, name: str, grad: torch.Tensor | None) -> bool:
        """Whether a gradient is one of this step, and not the mean of an earlier one that nobody has cleared."""
        if grad is None or name in self._accumulated_since:
            return grad is not None
        changed = getattr(grad, _AVERAGED, None) != grad._version  # by the loop itself
        return changed or not self._accumulated_since
