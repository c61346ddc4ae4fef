"""A hook of parameters that pushes their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..session import Session


def push_hook(session: Session, name: str) -> Callable[[torch.nn.Parameter], None]:
    """What ``register_post_accumulate_grad_hook`` takes: it pushes the gradient, and ``session.wait_all()`` waits.

    For loops of one's own; ``GradientSync`` does the rest as well: accumulation, unused parameters, loss scaling.

    Example:
        >>> import torch
        >>> model, session = torch.nn.Linear(3, 2), espresso_mpi.Session()
        >>> for name, parameter in model.named_parameters():
        ...     hook = espresso_mpi.torch.push_hook(session, name)
        ...     handle = parameter.register_post_accumulate_grad_hook(hook)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> session.wait_all()
        >>> session.close()
    """

    def push(parameter: torch.nn.Parameter) -> None:
        session.push(name, parameter.grad)

    return push
