"""DiLoCo as an optimizer of torch, around the one that takes the local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import optim
from ..errors import ConfigError, StateError
from ..session import Session
from . import names


class DiLoCo(torch.optim.Optimizer):
    """``espresso_mpi.optim.DiLoCo`` around optimizers of torch: each step is theirs, and an average when it is due.

    Learning rate schedulers work with it: its parameter groups are those of the local optimizers. Do not call these
    any more. Only parameters that require a gradient when this is made are averaged. A ``GradScaler`` must not skip the
    steps of single ranks.

    Args:
        optimizers: the local optimizer, or several that step together, such as Muon and AdamW for MuLoCo. Make them of
            named parameters if the session also serves another model.
        session: see ``espresso_mpi.optim.DiLoCo``.
        every, nesterov, fragments, delay, mix: see there.
        outer_lr, outer_momentum: η and μ, its ``lr`` and ``momentum``.

    Raises:
        ConfigError: as there; or an argument is no optimizer, or two parameters have the same name.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> with espresso_mpi.Session(compressor="int4") as session:
        ...     espresso_mpi.torch.broadcast_module(model, session)
        ...     adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        ...     optimizer = espresso_mpi.torch.DiLoCo(adamw, session, every=2)
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(4, 3)).sum().backward()
        ...         optimizer.step()
        ...     optimizer.average()
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        session: Session,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
    ) -> None:
        local, trained = self._around(optimizers, session)
        self._diloco = optim.DiLoCo(
            trained, session, every, outer_lr, outer_momentum, nesterov, fragments, delay, mix
        )  # fmt: skip
        self._begin(local)

    @classmethod
    def sparse(
        cls,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        session: Session,
        every: int = 100,
        outer_lr: float = 1.0,
        fragments: int = 1,
        delay: int = 0,
    ) -> DiLoCo:
        """SparseLoCo: see ``espresso_mpi.optim.DiLoCo.sparse``."""
        made = cls.__new__(cls)
        local, trained = made._around(optimizers, session)
        made._diloco = optim.DiLoCo.sparse(trained, session, every, outer_lr, fragments, delay)
        made._begin(local)
        return made

    @staticmethod
    def _around(optimizers: Any, session: Session) -> tuple[list[torch.optim.Optimizer], dict[str, torch.Tensor]]:
        """The local optimizers, and the parameters that they train, by name."""
        local = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if not local or not all(isinstance(one, torch.optim.Optimizer) for one in local):
            raise ConfigError(f"DiLoCo: got {optimizers!r}; expected an optimizer of torch, or a list of them")
        trained: dict[str, torch.Tensor] = {}
        for number, group in enumerate(group for one in local for group in one.param_groups):
            given = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            for name, parameter in zip(given, group["params"]):
                if not parameter.requires_grad:
                    continue
                if name in trained:
                    raise ConfigError(f"DiLoCo: two parameters are named {name!r}; expected names of their own")
                names.take(session, name, parameter)
                trained[name] = parameter
        return local, trained

    def _begin(self, local: list[torch.optim.Optimizer]) -> None:
        self._local = local
        super().__init__([group for one in local for group in one.param_groups], {})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: torch's own method leaves out what is not of its class."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_local": self._local, "_diloco": self._diloco}

    @property
    def outer_lr(self) -> float:
        """The outer learning rate η. It can be set between steps."""
        return self._diloco.lr

    @outer_lr.setter
    def outer_lr(self, value: float) -> None:
        self._diloco.lr = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every optimizer."""
        for one in self._local:
            one.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the local optimizers. Collective in the steps in which a fragment is due.

        Args:
            closure: computes the loss and the gradients anew, for the first of the local optimizers.

        Returns:
            The loss of the closure.

        Raises:
            EspressoError: as ``espresso_mpi.optim.DiLoCo.step``.
        """
        loss = self._local[0].step() if closure is None else self._local[0].step(closure)
        for one in self._local[1:]:
            one.step()
        self._diloco.step()
        return loss

    def average(self) -> None:
        """Make the parameters of all ranks equal: see ``espresso_mpi.optim.DiLoCo.average``. Collective."""
        self._diloco.average()

    def state_dict(self) -> dict[str, Any]:
        """The states of the local optimizers, and that of DiLoCo. Residuals are the session's state.

        Raises:
            ConfigError: a fragment is on its way; call ``average`` before it.
        """
        return {"local": [one.state_dict() for one in self._local], "diloco": self._diloco.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: it is the state of another optimizer, or damaged. Nothing has been changed then.
            ConfigError: a fragment is on its way; call ``average`` before it.
            ValueError: torch's, if it is that of other local optimizers.
        """
        saved = state.get("local")
        if not isinstance(saved, list) or len(saved) != len(self._local):
            raise StateError(
                f"DiLoCo: the state is none of {len(self._local)} local optimizers; load what state_dict returned"
            )
        before = self._diloco.state_dict()
        self._diloco.load_state_dict(state.get("diloco", {}))
        try:
            for one, own in zip(self._local, saved):
                one.load_state_dict(own)
        except ValueError:
            self._diloco.load_state_dict(before)
            raise
        self.param_groups = [group for one in self._local for group in one.param_groups]
