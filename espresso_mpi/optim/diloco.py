"""DiLoCo (Douillard et al., 2023) and its streaming form (2025): many local steps, then one small message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..arrays import buffers
from ..errors import ConfigError, StateError
from .messages import check_session, wait_for
from .saved import array, entries
from .settings import count, number
from .tensors import Tensor, as_before, message_of, tensors_of
from .updates import OUTER, PROGRESS

if TYPE_CHECKING:
    from ..session import Session
    from ..sessions.handles import Handle


N = TypeVar("N")


@dataclass
class _Under:
    """A fragment under way: the step from which its result is used, and the handles of its tensors."""

    due: int
    names: tuple[str, ...]
    handles: list[Handle] = field(default_factory=list)


def require_plain(owner: str, session: Session) -> None:
    """Refuse a session whose feedback cannot take the place of the outer momentum.

    Raises:
        ConfigError: it is not plain.
    """
    if session.feedback.kind != "plain":
        raise ConfigError(
            f"{owner}: the session has feedback={str(session.feedback)!r}; expected 'plain:decay=0.95' or "
            f"another decay: it takes the place of the outer momentum"
        )


class DiLoCo:
    """Averages the progress of local steps: an outer optimizer around the one of your training loop.

    Each rank trains with its own optimizer and with gradients that are not synchronised. All ranks share an anchor a.
    After H steps, the ranks average how far their parameters x have moved from the anchor. They take one step of SGD
    with momentum along this mean::

        d = mean of C(a - xᵢ + residualᵢ);  u ← μ u + d;  a ← a - η (d + μ u);  x ← a

    The messages are 1/H of those of a synchronisation in every step, and the session's compressor makes them smaller.
    With ``fragments``, parts of the model are averaged in turn, so that less is sent at a time (streaming DiLoCo). With
    ``delay``, training continues for this number of steps while a part is in flight; then x ← α x + (1 - α) a.

    All ranks must start from the same parameters. The parameters differ between two averages. ``average`` makes them
    equal, for validation and at the end.

    Args:
        params: float32 or float64 arrays in nested lists, tuples and dicts, as for ``Clan``. Pass only parameters that
            are trained, such as ``{n: p for n, p in model.named_parameters() if p.requires_grad}`` with torch.
        session: synchronises the progress; ``compressor="int4"`` is usual. It needs ``nonfinite="raise"``. The name
            of the progress of ``w`` is ``DiLoCo w``, so that it has no residual of a gradient.
        every: H, the number of local steps. The default, 30, had a lower loss than 15, 60 and 100 in runs of 3000 steps
            (docs/optimizers.md); papers have up to 500 in longer runs.
        lr: η, the outer learning rate. It is an attribute, and can be set between steps.
        momentum: μ. The defaults of η and μ are the best of a sweep of short runs, and within 0.5 % of the best in
            runs of 3000 steps (docs/optimizers.md); the paper has 0.9, for longer runs.
        nesterov: whether the step is that of Nesterov's momentum, as above. Otherwise it is u.
        fragments: number of parts of about equal size.
        delay: number of local steps while a part is on its way; less than H/fragments.
        mix: α, the share of a rank's own parameters that remains. The default is 0.5 with a delay, as in the paper, and
            0 without one.

    Raises:
        ConfigError: a number is out of its range, or the session would skip values that are not finite.
        GradientError: a parameter cannot be updated; the text names it.

    Example:
        >>> params = {"w": np.ones((64, 64), np.float32)}
        >>> with espresso_mpi.Session(compressor="int4") as session:
        ...     diloco = espresso_mpi.optim.DiLoCo(params, session, every=10, lr=1.0, momentum=0.0)
        ...     for step in range(10):
        ...         params["w"] -= 0.01  # a local step, by any optimizer
        ...         params = diloco.step()
        >>> round(float(params["w"].mean()), 3)
        0.9
    """

    def __init__(
        self,
        params: Any,
        session: Session,
        every: int = 30,
        lr: float = 0.7,
        momentum: float = 0.6,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
    ) -> None:
        check_session("DiLoCo", session)
        self._every, fragments, self._delay = intervals("DiLoCo", every, fragments, delay)
        self.lr = lr
        self._momentum = number("DiLoCo", "momentum", momentum, 0, 1)
        self._direct = 1.0 if nesterov else 0.0
        self._mix = own_share("DiLoCo", mix, self._delay)
        self._session, self._params, self._steps = session, params, 0
        tensors = tensors_of(params)
        self._anchors = {t.name: t.library.copy(t.array) for t in tensors}
        self._velocities = {t.name: t.library.zeros(t) for t in tensors}
        self._messages = {t.name: message_of(t) for t in tensors}
        self._fragments = parts([(t.name, t.size) for t in tensors if t.size], fragments)
        self._under: list[_Under] = []

    @classmethod
    def sparse(
        cls, params: Any, session: Session, every: int = 30, lr: float = 2.0, fragments: int = 1, delay: int = 0
    ) -> DiLoCo:
        """SparseLoCo (Sarfi et al., 2025): sparse messages, whose error feedback takes the place of the momentum.

        What a rank's message leaves out decays, and goes with the next ones::

            eᵢ ← β eᵢ + (a - xᵢ);  qᵢ = C(eᵢ);  eᵢ ← eᵢ - qᵢ;  a ← a - η · mean of qᵢ;  x ← a

        The paper's C is ``topk_in_chunks:chunk=4096,k=64`` with values in two bits, ``values=int2`` here; the messages
        then are 0.16 bits per element. The equations are those of routes that compress once
        (``route="flat-allgather"``).

        Args:
            params, every, fragments, delay: as for ``DiLoCo``.
            lr: η, 1 in the paper; see docs/optimizers.md for what others cost.
            session: its compressor is C, and its feedback has β: ``feedback="plain:decay=0.95"`` in the paper.

        Raises:
            ConfigError: the session's feedback is not ``plain``; others as for ``DiLoCo``.

        Example:
            >>> params = {"w": np.ones((64, 64), np.float32)}
            >>> options = {"compressor": "topk_in_chunks:values=int2", "feedback": "plain:decay=0.95"}
            >>> with espresso_mpi.Session(**options) as session:
            ...     sparse = espresso_mpi.optim.DiLoCo.sparse(params, session, every=10)
            ...     for step in range(20):
            ...         params["w"] -= 0.01  # a local step, by any optimizer
            ...         params = sparse.step()
        """
        require_plain("DiLoCo.sparse", session)
        return cls(params, session, every, lr, momentum=0.0, fragments=fragments, delay=delay)

    @property
    def lr(self) -> float:
        """The outer learning rate η."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = number("DiLoCo", "lr", value, 0, 1e30)

    @property
    def steps(self) -> int:
        """Number of local steps so far."""
        return self._steps

    def step(self, params: Any = None) -> Any:
        """Call this after each step of the local optimizer. Collective in the steps in which a fragment is due.

        Args:
            params: the parameters if they are other arrays now (JAX); default: those of before.

        Returns:
            The parameters: the same containers, unless they hold arrays that cannot be changed (JAX).

        Raises:
            GradientError: ``params`` has others than before, or of other sizes.
            EspressoError: as ``Session.sync``, on every rank. Parameters and anchors have not changed then.
        """
        tensors = self._tensors(params)
        self._steps += 1
        for number_, names in enumerate(self._fragments):
            if self._steps % self._every == phase(self._every, number_, len(self._fragments)):
                self._send(tensors, names, self._steps + self._delay)
        return self._receive(tensors, self._steps)

    def average(self, params: Any = None) -> Any:
        """Average all fragments at once, so that all ranks have the same parameters: the anchors. Collective.

        This is an outer step that comes early, with its momentum. A fragment that no rank has moved since its last
        average stays as it is.

        Args:
            params: as for ``step``.

        Returns:
            As ``step``.
        """
        tensors = self._tensors(params)
        self._params = self._receive(tensors, self._steps + self._delay)
        tensors = self._tensors(None)
        for names in self._moved(tensors):
            self._send(tensors, names, self._steps)
        return self._receive(tensors, self._steps, mix=0.0)

    def _moved(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
        """The fragments that a rank has moved from the anchor; a step along no progress would be one of the momentum.

        Collective, because all ranks must send the same.
        """

        def has_moved(name: str) -> bool:
            return bool((tensors[name].array != self._anchors[name]).any())

        here = np.array([any(map(has_moved, names)) for names in self._fragments], np.uint8)
        agreed = self._session.allreduce(here, op="max", name="DiLoCo moved") if here.size else here
        return [names for names, moved in zip(self._fragments, agreed) if moved]

    def _tensors(self, params: Any) -> dict[str, Tensor]:
        tensors = as_before("DiLoCo", tensors_of(self._params if params is None else params), self._anchors)
        self._params = self._params if params is None else params
        return {t.name: t for t in tensors}

    def _send(self, tensors: Mapping[str, Tensor], names: tuple[str, ...], due: int) -> None:
        fragment = _Under(due, names)
        for name in names:
            tensor, message = tensors[name], self._messages[name]
            PROGRESS(tensor.library, (message.reshape(-1), self._anchors[name], tensor.array))
            fragment.handles.append(self._session.push(f"DiLoCo {name}", message))
        self._under.append(fragment)

    def _receive(self, tensors: Mapping[str, Tensor], step: int, mix: float | None = None) -> Any:
        """Use the results that are due in this step: all of them, or none if one is an error."""
        due = [fragment for fragment in self._under if fragment.due <= step]
        self._under = [fragment for fragment in self._under if fragment.due > step]
        wait_for(handle for fragment in due for handle in fragment.handles)
        for fragment in due:
            for name in fragment.names:
                self._update(tensors[name], self._mix if mix is None else mix)
        self._params = buffers.rebuild(self._params, [tensor.adopted for tensor in tensors.values()])
        return self._params

    def _update(self, tensor: Tensor, mix: float) -> None:
        name, ahead = tensor.name, self._momentum if self._direct else 1.0
        arrays = (tensor.array, self._anchors[name], self._velocities[name], self._messages[name].reshape(-1))
        OUTER(tensor.library, arrays, (self._lr, self._momentum, self._direct, ahead, mix, 1 - mix))

    def _require_none_under_way(self, call: str) -> None:
        if self._under:
            raise ConfigError(f"DiLoCo: a fragment is on its way; call average() before {call}()")

    def state_dict(self) -> dict[str, Any]:
        """The counter, and anchor and velocity of each tensor as numpy arrays: a copy.

        Residuals are the session's state.

        Raises:
            ConfigError: a fragment is on its way; call ``average`` before it.
        """
        self._require_none_under_way("state_dict")
        return {
            "steps": self._steps,
            "tensors": {
                t.name: {
                    "anchor": t.library.to_host(self._anchors[t.name]),
                    "velocity": t.library.to_host(self._velocities[t.name]),
                }
                for t in tensors_of(self._params)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        The parameters, ``lr`` and the state of the session are the caller's to restore.

        Raises:
            ConfigError: a fragment is on its way; call ``average`` before it.
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed in either case.
        """
        self._require_none_under_way("load_state_dict")
        tensors = tensors_of(self._params)
        saved = entries("DiLoCo", state, self._anchors, "tensors")
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise StateError(f"DiLoCo: steps={steps!r} in the state; expected a whole number")
        loaded = {
            t.name: [array(t, saved[t.name], "anchor", np.float64), array(t, saved[t.name], "velocity")]
            for t in tensors
        }
        self._steps = steps
        for tensor in tensors:
            for own, value in zip((self._anchors, self._velocities), loaded[tensor.name]):
                own[tensor.name][...] = tensor.library.from_host(tensor, value)


def intervals(owner: str, every: Any, fragments: Any, delay: Any) -> tuple[int, int, int]:
    """The three as checked numbers.

    Raises:
        ConfigError: one is out of its range, or they do not fit together.
    """
    every, fragments = count(owner, "every", every, 1), count(owner, "fragments", fragments, 1)
    delay = count(owner, "delay", delay, 0)
    if fragments > every or delay * fragments >= every:
        raise ConfigError(
            f"{owner}: every={every}, fragments={fragments}, delay={delay}; expected at most one fragment in a step "
            f"and delay < every/fragments, so that a fragment arrives before the next one leaves"
        )
    return every, fragments, delay


def own_share(owner: str, mix: Any, delay: int) -> float:
    """α as a checked number; None stands for its default.

    Raises:
        ConfigError: it is out of its range.
    """
    return number(owner, "mix", (0.5 if delay else 0.0) if mix is None else mix, 0, 1)


def parts(sizes: Sequence[tuple[N, int]], number_: int) -> list[tuple[N, ...]]:
    """Neighbours together, in parts of about equal numbers of elements; none is empty while there are tensors."""
    number_ = min(number_, len(sizes))
    total, sent = sum(size for _, size in sizes), 0
    found: list[tuple[N, ...]] = []
    current: list[N] = []
    for position, (name, size) in enumerate(sizes):
        current.append(name)
        sent += size
        after = [size for _, size in sizes[position + 1 :]]
        missing = number_ - len(found) - 1
        cut = (sent + (after[0] if after else 0) / 2) * number_ >= total * (len(found) + 1)  # the nearest place for it
        if missing and after and (cut or len(after) == missing):
            found.append(tuple(current))
            current = []
    return [*found, tuple(current)] if current else found


def phase(every: int, number_: int, of: int) -> int:
    """The step within ``every`` ones in which one of several parts is averaged."""
    return (every * (number_ + 1) // of) % every
