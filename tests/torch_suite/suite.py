"""torch's own tests of backends, prepared for the process group "espresso" and for ranks that live on between tests."""

from __future__ import annotations

import os
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

from mpi4py import MPI

WORLD = MPI.COMM_WORLD

os.environ.update(BACKEND="espresso", WORLD_SIZE=str(WORLD.size), INIT_METHOD="file://")  # read at import

import torch
from torch import distributed
from torch.testing._internal.common_distributed import with_dist_debug_levels
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest
from torch_suite.host_memory import host_memory

import espresso_mpi.torch  # noqa: F401  makes the process group known

TIMEOUT = 20.0
"""Seconds that operations of the process group may take; torch gives 60, which a test that fails would cost."""

torch.set_num_threads(1)  # ranks share the cores

NAMES = tuple(sorted(name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_")))

LIMIT = 180
"""Seconds that a test may take, of which some compile code or train for a while."""

_FAILED = 1
"""The tag of messages that tell the other ranks of a failure."""


class Case(TestCase, DistributedTest._DistTestBase):  # type: ignore[misc]
    """One test of torch, on this rank. ``MultiProcessTestCase``, its usual base, spawns the ranks of every test."""

    rank, world_size = WORLD.rank, WORLD.size

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.comm = WORLD.Dup()  # one that failed leaves messages behind

    def _barrier(self, *_: Any, timeout: float = 30, **__: Any) -> None:
        """Torch's own polls a folder."""
        arrived, start = self.comm.Ibarrier(), time.monotonic()
        while not arrived.Test():
            if self.comm.Iprobe(tag=_FAILED) or time.monotonic() - start > timeout:
                raise RuntimeError("a rank did not come to a barrier of the test")
            time.sleep(1e-3)

    def tell(self) -> None:
        """Tell the other ranks that this one has failed."""
        for rank in set(range(WORLD.size)) - {WORLD.rank}:
            self.comm.isend(None, rank, tag=_FAILED)


def run(name: str, folder: str) -> None:
    """Run one test in the living ranks, in a process group of its own.

    Args:
        folder: an empty one, the same on all ranks, which must stay: the end of a rank's store opens its file.
    """
    case = Case(name)
    with _environment(folder), _process_group(case, name, folder), host_memory(WORLD.size), _backend(name):
        case.setUp()
        unguarded(getattr(Case, name))(case)
        case.tearDown()
        case.doCleanups()
        case._barrier()
    case.comm.Free()


@contextmanager
def _environment(folder: str) -> Iterator[None]:
    """What torch's launcher of tests sets."""
    for name in ("barrier", "test_dir", "init_dir") if WORLD.rank == 0 else ():
        os.mkdir(os.path.join(folder, name))
    before = dict(os.environ)
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_dir/shared_init_file")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _process_group(case: Case, name: str, folder: str) -> Iterator[None]:
    timeout = timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, TIMEOUT))
    distributed.init_process_group("espresso", f"file://{folder}/store", timeout, WORLD.size, WORLD.rank)
    case._barrier()
    try:
        yield
    except BaseException as error:
        case.tell()
        for group in list(distributed.distributed_c10d._world.pg_map):
            group.abort()
        if isinstance(error, (unittest.SkipTest, SystemExit)):  # both by guards in the bodies of tests
            raise AssertionError(f"{name} skips itself ({error}); name it in not_applicable.py") from error
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.set_debug_level_from_env()


@contextmanager
def _backend(name: str) -> Iterator[None]:
    """Bodies of tests that ask for the name of the backend mean whether it takes tensors in host memory, as gloo."""
    asks = name.startswith("test_accumulate_gradients")
    at_import = {"BACKEND": "gloo" if asks else "espresso", "INIT_METHOD": os.environ["INIT_METHOD"]}
    own = mock.patch.object(distributed, "monitored_barrier", _monitored_barrier)
    with mock.patch.multiple(distributed_test, **at_import), own:
        yield


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Torch's function, but it does not refuse all backends except gloo."""
    if distributed.get_rank(group) >= 0:
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or distributed.group.WORLD).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)


def unguarded(test: Callable[..., None]) -> Callable[..., None]:
    """A test without the guards that skip it by the name of the backend or the number of GPUs: the list says which run.

    Its other decorator is kept, which runs the test once for every level of debugging.
    """
    levels = None
    while hasattr(test, "__wrapped__"):
        closed = dict(zip(test.__code__.co_freevars, test.__closure__ or ()))
        levels = closed["levels"].cell_contents if "levels" in closed else levels
        test = test.__wrapped__
    return with_dist_debug_levels(levels)(test) if levels else test
