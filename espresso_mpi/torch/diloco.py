"""DiLoCo as an optimizer of torch, around the one that takes the local steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import optim
from ..errors import ConfigError, StateError
from ..session import Session
from . import names
from .optimizer_states import copied, on_the_host


class DiLoCo(torch.optim.Optimizer):
    """``espresso_mpi.optim.DiLoCo`` around optimizers of torch: each step is theirs, and an average when it is due.

    Learning rate schedulers work with it: its parameter groups are those of the local optimizers. Do not call these
    any more. Parameters that require no gradient when this is made stay as they are; make a new one after they are
    thawed. A ``GradScaler`` must not skip the steps of single ranks.

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
        every: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
    ) -> None:
        local, trained = _around(optimizers, session)
        self._diloco = optim.DiLoCo(
            trained, session, every, outer_lr, outer_momentum, nesterov, fragments, delay, mix
        )  # fmt: skip
        self._begin(local)

    @classmethod
    def sparse(
        cls,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        session: Session,
        every: int = 30,
        outer_lr: float = 2.0,
        fragments: int = 1,
        delay: int = 0,
    ) -> DiLoCo:
        """SparseLoCo: see ``espresso_mpi.optim.DiLoCo.sparse``."""
        made = cls.__new__(cls)
        local, trained = _around(optimizers, session)
        made._diloco = optim.DiLoCo.sparse(trained, session, every, outer_lr, fragments, delay)
        made._begin(local)
        return made

    def _begin(self, local: list[torch.optim.Optimizer]) -> None:
        self._local, self._made = local, False
        groups = [group for one in local for group in one.param_groups]
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        defaults = {key: value for one in local for key, value in one.defaults.items()}
        super().__init__(groups, defaults)
        self._made = True

    def __deepcopy__(self, known: dict[int, Any]) -> DiLoCo:
        """A copy by the same session, which goes on in the place of this one: both would share the residuals."""
        return copied(self, known, ("_local", "_diloco", "_frozen", "_made"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible.

        Raises:
            ConfigError: always, once this is made.
        """
        if self._made:
            raise ConfigError(
                "DiLoCo: the parameters are those of the local optimizers; add the group to one of them, and make a "
                "new DiLoCo"
            )
        super().add_param_group(param_group)

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
            ConfigError: a parameter has been thawed.
        """
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"DiLoCo: a parameter of shape {tuple(thawed[0].shape)} requires a gradient now, and did not when this "
                f"was made; make a new DiLoCo after parameters are thawed"
            )
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
        diloco = self._diloco.state_dict()
        tensors = {
            name: {key: torch.from_numpy(array) for key, array in entry.items()}
            for name, entry in diloco["tensors"].items()
        }
        return {"local": [one.state_dict() for one in self._local], "diloco": {**diloco, "tensors": tensors}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            StateError: it is the state of another optimizer, or damaged.
            ConfigError: a fragment is on its way; call ``average`` before it.
            ValueError, KeyError: torch's, if it is that of other local optimizers. Nothing has been changed in any
                case.
        """
        saved = state.get("local")
        if not isinstance(saved, list) or len(saved) != len(self._local):
            raise StateError(
                f"DiLoCo: the state is none of {len(self._local)} local optimizers; load what state_dict returned"
            )
        before = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except Exception:
            self._load(before)
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        try:
            for one, own in zip(self._local, state["local"]):
                one.load_state_dict(own)
            self._diloco.load_state_dict(_without_gpu(state.get("diloco", {})))
        finally:  # torch replaces the groups of a local optimizer
            self.param_groups = [group for one in self._local for group in one.param_groups]


def _around(optimizers: Any, session: Session) -> tuple[list[torch.optim.Optimizer], dict[str, torch.Tensor]]:
    """The local optimizers, and the parameters that they train, by name."""
    local = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    if not local or not all(isinstance(one, torch.optim.Optimizer) for one in local):
        raise ConfigError(f"DiLoCo: got {optimizers!r}; expected an optimizer of torch, or a list of them")
    groups = enumerate(group for one in local for group in one.param_groups)
    given = [(name, p) for n, group in groups for name, p in names.of_group(n, group) if p.requires_grad]
    trained = dict(given)
    if len(trained) < len(given):
        twice = next(name for name, parameter in given if trained[name] is not parameter)
        raise ConfigError(f"DiLoCo: two parameters are named {twice!r}; expected names of their own")
    names.take_all(session, given)
    return local, trained


def _without_gpu(state: Any) -> Any:
    """A state of ``optim.DiLoCo`` whose tensors are on no GPU."""
    tensors = state.get("tensors") if isinstance(state, Mapping) else None
    if not isinstance(tensors, Mapping):
        return state
    host = {name: on_the_host(entry) for name, entry in tensors.items() if isinstance(entry, Mapping)}
    return {**state, "tensors": host}
