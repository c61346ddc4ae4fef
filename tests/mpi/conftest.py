"""Multi-rank tests fail on all ranks together, and never hang; with ``--quick`` each runs where RANKS says."""

from pathlib import Path

import pytest
from mpi4py import MPI
from rank_outcomes import *  # noqa: F403
from selection import deselect

HERE = Path(__file__).parent
USUAL = (4,)
RANKS = {
    # What depends on the number of ranks: how data are cut, who talks to whom, in which order.
    "test_sync": (3, 4),
    "test_sync::test_dense_is_the_mean": (2, 3, 4),
    "test_sync::test_conservation_law": (4,),  # test_routes and test_methods have it on three, for fewer steps
    "test_sync::test_every_bit_is_the_sum_of_decoded_payloads": (4,),  # test_methods has it on three, for every method
    "test_linear": (3, 4),
    "test_linear::test_conservation_law": (3,),
    "test_methods": (3,),  # on four, test_sync has the same laws for the methods that are used most
    "test_methods::test_a_restored_session_goes_on_bit_for_bit": (4,),
    "test_methods::test_payloads_with_something_in_common_are_summed_by_default": (4,),
    "test_methods::test_a_low_rank_gradient_arrives_after_a_few_steps": (4,),
    "test_routes": (3, 4),
    "test_routes::test_every_route_in_pieces": (4,),  # on three, the mean and the residuals of every route
    "test_routes::test_what_ef21_keeps_belongs_to_the_route": (4,),
    "test_routes::test_segments_go_every_way": (3,),
    "test_routes::test_dense_routes_carry_every_type": (4,),
    "test_routes::test_tensors_beyond_a_message": (4,),
    "test_routes::test_a_session_takes_any_route": (4,),
    "test_routes::test_every_route_loses_nothing[topk:ratio=0.1]": (4,),  # on three, with `onebit`
    "test_routes::test_every_route_loses_nothing[int8:rounding=stochastic]": (4,),
    "test_routes::test_every_route_that_sums_payloads[powersgd]": (4,),  # on three, with `thc`
    "test_routes::test_every_route_that_sums_payloads[topk_chunked:ratio=0.3,chunk=16]": (4,),
    "test_schedule": (3, 4),
    "test_schedule::test_pushes_in_any_order_and_steps_without_some_tensors": (4,),
    "test_schedule::test_tensors_that_never_come": (3,),  # each rank waits by itself
    "test_schedule::test_a_recording_that_ends_by_an_error_with_tensors_under_way": (3,),
    "test_window": (3, 4),
    "test_window::test_a_missing_rank_is_named_by_all": (3,),  # each layout waits for seconds
    "test_engine::test_any_order_gives_what_sync_gives": (3, 4),
    "test_engine::test_any_errors_in_any_order": (3, 4),
    "test_errors::test_routes_that_lose_ranks_of_uneven_nodes_are_refused": (3, 4),
    "test_state::test_residuals_are_conserved_on_other_ranks": (3, 4),
    "test_state::test_momenta_are_conserved_in_the_mean": (3, 4),
    # What two ranks show, or can only be shown on two.
    "test_autoplan": (2,),
    "test_bench_accuracy": (2,),
    "test_bench_collectives": (2,),
    "test_bench_optimizers": (2,),
    "test_bench_sync": (2,),
    "test_bench_sync::test_scaling_measures_sizes_and_ranks": (4,),
    "test_bench_train": (2,),
    "test_bench_validate": (2,),
    "test_first_steps": (2,),
    "test_frameworks": (2,),
    "test_jax_adapter": (2,),  # each rank compiles the same programs
    "test_lifetime": (2,),
    "test_optim": (2,),
    "test_plan_file": (2,),
    "test_profiler": (2,),
    "test_trainers": (2,),
    "test_profiler::test_every_route_can_be_priced[two]": (4,),  # nodes of two ranks
}
"""With ``--quick``: on how many ranks a module, a test (``module::test``) or a case (``module::test[case]``) runs.
All others run on USUAL."""


def pytest_ignore_collect(collection_path, config):
    """A quick run does not import modules that have nothing for this number of ranks: frameworks take seconds."""
    module = collection_path.stem
    if config.getoption("quick") and module.startswith("test_"):
        wanted = [ranks for name, ranks in {module: USUAL, **RANKS}.items() if name.partition("::")[0] == module]
        return True if MPI.COMM_WORLD.size not in {size for ranks in wanted for size in ranks} else None
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("quick"):
        # pytest passes the items of other folders too.
        deselect(config, items, lambda item: HERE in item.path.parents and MPI.COMM_WORLD.size not in ranks_for(item))


def ranks_for(item):
    """On how many ranks a quick run has this test."""
    module = item.path.stem
    found = (RANKS.get(name) for name in (f"{module}::{item.name}", f"{module}::{item.originalname}", module))
    return next(filter(None, found), USUAL)


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes in one thread: ranks share the cores."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def group():
    """Torch's default process group, of a module."""
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("espresso")
    yield distributed.group.WORLD
    distributed.destroy_process_group()
