"""How a session makes a collective call: the arrays are taken, and what is to be done with them is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..arrays.buffers import Gradient
from ..engine.batches import Batch
from ..engine.calls import Exchange
from ..errors import ConfigError
from .base import SessionBase
from .copies import Splits
from .exchanges import Taken
from .handles import Handle


class Calling(SessionBase):
    """A session that makes collective calls."""

    guards_memory: ClassVar[bool] = True
    """Whether a call claims its arrays until it was waited for; see docs/torch.md."""

    @cached_property
    def _splits(self) -> Splits:
        return Splits()

    def _collective(
        self, kind: str, name: str, take: Callable[[], Taken],
        make: Callable[[Sequence[Gradient]], Batch | Exchange], blocking: bool,
    ) -> Any:  # fmt: skip
        self._engine.require_usable()
        self._held.release()
        if not blocking:
            self._transport.require_threads()
        title = f"{kind}({name!r})" if name else kind
        call = self._intake.collective((kind, name), take, title, make, self._options.debug, self.guards_memory)
        if blocking:
            return self._wait(self._engine.submit(call))
        self._engine.submit(call, background=True)
        if self.guards_memory:
            self._pending.add(call)
        return Handle(self, call)

    def _check_root(self, kind: str, root: int) -> None:
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.topology.size:
            raise ConfigError(f"{kind}: root={root!r}; expected a rank, from 0 to {self.topology.size - 1}")
