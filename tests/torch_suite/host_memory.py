"""Host memory in the place of a GPU's: tests of models on GPUs run on nodes that have none.

Most of torch's tests of DistributedDataParallel ask for one GPU per rank, although nothing that they test is CUDA's.
Here ``.cuda()`` returns its tensor, and ``device=`` takes every GPU for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")


@contextmanager
def host_memory(ranks: int) -> Iterator[None]:
    """GPUs are the CPU, one for each rank."""
    with ExitStack() as stack:
        for name, stands in {
            "device": nullcontext, "set_device": lambda *_: None, "synchronize": lambda *_, **__: None,
            "current_device": lambda: CPU,
            "device_count": lambda: ranks, "manual_seed": torch.manual_seed,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, stands))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", mock.MagicMock()))
        stack.enter_context(mock.patch.object(torch, "Event", _Event))
        stack.enter_context(mock.patch.object(common_distributed, "TEST_CUDA", True))  # for guards inside of tests
        plain = DistributedDataParallel.__init__
        stack.enter_context(mock.patch.object(DistributedDataParallel, "__init__", _without_devices(plain)))
        stack.enter_context(_OnCpu())
        yield


def _without_devices(plain: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any) -> None:  # noqa: N807
        plain(self, module, **more)

    return __init__


class _Event:
    """What was recorded has happened: work on the CPU ends before the next begins."""

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any, **__: Any) -> None: ...


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and args and _is_gpu(args[0]):
            return CPU
        if func in (torch.Tensor.to, torch._C._nn._parse_to):
            args = tuple(CPU if _is_gpu(x) else x for x in args)
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
