"""Code that ``torch.compile`` runs as it is, and does not trace."""

from __future__ import annotations

import inspect
from typing import TypeVar

C = TypeVar("C", bound=type)


def untraced(kind: C) -> C:
    """A class whose methods, and what these call, are not traced.

    torch's operations call the methods of a process group from C++, where ``torch.compiler.disable`` around a call has
    no place; around a definition it would import ``torch._dynamo``, which takes seconds.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for function in vars(kind).values():
        if inspect.isfunction(function):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be inlined
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind
