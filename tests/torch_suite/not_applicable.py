"""The tests of torch that do not apply to the process group "espresso", and why; all others run."""

from __future__ import annotations

_SYNC_BATCH_NORM = "SyncBatchNorm takes modules on GPUs only"
_NCCL = "makes a group of the backend nccl, which torch for the CPU does not have"
_PROFILER = "torch.profiler takes asynchronous ranges from C++ only, so none of a process group in Python"

NOT_APPLICABLE = {
    "test_DistributedDataParallel": "torch skips it on Linux (pytorch#77317); it cuts batches by GPUs",
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_non_default_stream": "a stream of CUDA",
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_average_parameters": _NCCL,
    "test_barrier_timeout_arg": "torch skips it on Linux (pytorch#179691); it asserts gloo's words",
    "test_batch_isend_irecv_mixed_backend_err": _NCCL,
    "test_ddp_device": "asserts the indices of GPUs",
    "test_ddp_has_finalized": "torch ignores its result: ranks are to crash",
    "test_ddp_hook_parity_post_localSGD": "makes as many groups as nodes by counting their GPUs",
    "test_ddp_hook_pickling_powerSGD": "torch skips it everywhere; torch.load refuses its file (weights_only)",
    "test_ddp_inference": _SYNC_BATCH_NORM,
    "test_ddp_logging_data_gpu": "asserts the indices of GPUs",
    "test_ddp_profiling_autograd_profiler": _PROFILER,
    "test_ddp_profiling_execution_trace": "asserts what nccl writes into traces",
    "test_ddp_profiling_torch_profiler": _PROFILER,
    "test_ddp_sync_bn_training_vs_eval": _SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs": "convolutions for GPUs: five minutes on two cores do not do; other tests of joining run",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_monitored_barrier_allreduce_hang": _NCCL,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _NCCL,
    "test_nccl_high_priority_stream": "an option of nccl",
    "test_sync_bn_logged": _SYNC_BATCH_NORM,
}
