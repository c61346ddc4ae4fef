"""The texts of the report ``bench report``: what its columns mean, and how its results were made."""

HEAD = """# Benchmarks

Written by `make bench`. Ratios within one run are what counts: the methods take turns in every repetition, so that a
noisy moment of the node meets all of them. Absolute times are this node's.
"""

COLUMNS = """
## What the columns mean

One float32 array of each size, on every rank. *median* and *p99* are over repetitions, of the slowest rank of each.
*x fp32* and *x MPI fp16* are the time of the quickest `MPI_Allreduce` on the same array, as it is and cast to float16,
divided by the method's; *x our fp16* that of our `fp16`: below 1 the method loses. MPI's rows: the library's own choice
of algorithm, in place; `-tuned`, the quickest of all others (Open MPI's six algorithms of the component `tuned`, each
in place and with two buffers, and its own choice with two buffers), found by trials before and named under *route*. In
float16 casts and sum are compiled; MPI's own half type is slower. Rows with another library's name are from a run of
their own, minutes apart: compare them less closely.

*algbw* and *busbw* are as in NVIDIA's nccl-tests: the bytes of the float32 array over the median time, and that times
2(p-1)/p for p ranks, the share of the array that each rank of an allreduce must send. Compression raises both.

*wire* is the least time on the busiest link: the bytes that a node sends to others over the best rate that a plain
stream between nodes reached in the same run. *memory* is the least time for what the ranks of a node must read
and write along the route (the formulas stand in `espresso_mpi/bench/bound.py`), at the rate of plain copies or sums,
whichever moved more, by all ranks at once in the same run. The larger one is the *bound*: no implementation of that
route, on that node, is quicker, but for what caches and the start of a link serve. For MPI, which does not tell its
algorithm, it is that of the allreduce with the least bytes, flat or by levels, casts included. *time / bound* is how
far above it a method is.

*between nodes* is what all ranks together send over links in one synchronisation. *wrong* counts elements that
differ from the reference: the float64 mean for dense, the sum of decoded payloads bit for bit for compressed methods.
On the emulated cluster all nodes share one memory, and a link that has paused lets the first 2 ms of data (250 kB at
1 Gbit) pass at full speed, so sizes below that show latency only, and can be below the bound.
"""

LOSSES = """
## Where compression loses

What took longer than the quickest way to average the same array in the same run. *Against fp32*: `MPI_Allreduce` of
float32 by the quickest of its algorithms, or our `none`, which is listed itself where MPI's was quicker. *Against
fp16*: `MPI_Allreduce` of float16, casts included, or our `fp16`, likewise; that is the fair baseline for everything
that loses more than a cast does. Another library is the quicker of its float32 and float16.

"""

SECTIONS = {
    "tensors": """
All gradients of a network at once, in the order of a backward pass. *fused* is `MPI_Allreduce` of one buffer as large
as all of them, without the copies into and out of it; *each* is one `MPI_Allreduce` a tensor. *time / fused* above 1
loses to the one buffer, *x each* above 1 beats one call per tensor. *wrong* as above.
""",
    "torch": """
One step of training: forward, backward, synchronisation, AdamW; all ways take turns. *gloo* is DDP over gloo, *ddp* is
DDP over the process group of this library with its hook, *push* is `GradientSync`, and *sync* the same without overlap.
*exposed* is the time beyond a step that computes alone. */ gloo* is over the step of DDP over gloo with torch's hook of
the same kind, or without a hook where torch has none.
""",
    "overlap": """
A step in which the main thread multiplies matrices and pushes each gradient when its share of that is done. *T_c* is
the computing alone, for each method so many products that it is about *T_s*; one computing, in turns with all methods,
says how long a product takes. *T_s* is one sync of everything alone, *largest* a sync of the largest tensor alone, in
turns with the step. *allowed* is 1.15 · max(T_c, T_s) + largest. *hidden* is the share of the shorter of T_c and T_s
that disappeared behind the other; below 0 pushing takes longer than computing and one sync one after the other. With
one rank a core, encoding, sums and the kernel's network stack take the core that computes, so only waiting for the wire
can be hidden. *wrong* counts elements in which pushing differs from one sync.
""",
    "scaling": """
t = α + β · bytes, fitted by least squares of relative errors; *deviation* is their root mean square. α is what a call
costs, 1/β the rate (of float32 input) that large arrays approach. *algbw* and *busbw* are those of the largest size.
*wrong* counts elements of arrays of at most 16 MiB; nothing stands there if the run did not count them.
""",
    "collectives": """
Every collective as a call, beside MPI's own blocking call on the same buffers, in turns. *size* is that of the largest
array of a rank. *median* and *p99* are over repetitions, of the slowest rank of each; *MPI* is its median, and *best /
best* compares the least times. *algbw* is the size over the median, *busbw* that times 2(p-1)/p for an allreduce over p
ranks, 1 for reduce and broadcast, (p-1)/p for all others. *wrong* counts elements that differ from the exact result,
over all ranks. *sent* is what all ranks together send in a compressed allreduce, *beyond expected* what that is more
than the sizes of the payloads along the route.
""",
    "compressors": """
`make bench-compressors`. GB/s are of float32 input, in the median and in the *best* repetition. *of bound*: the least
time that the method's memory traffic could take, at the best rate of the plain kernels in the first rows, divided by
the best time it took. *read*, *update* and *accumulate* move 4, 8 and 12 bytes per element; *copy* counts 8, but lines
that are written without having been read are read first, so it is below the others. Caches are emptied before each
call of the large arrays, which are four times the last-level cache. The small ones are timed after four calls in a row,
as where a gradient has just been computed; memory does not bound them. Encode includes the residual, eight of the
twelve bytes per element that it reads and writes, except in the rows that say so: those methods refuse error feedback.
*vNMSE* is ‖x − C(x)‖²/‖x‖² on normal values, *expected* what analysis says of it. *call* is the time to encode one
element.
""",
    "train": """
A character language model on the English text in Python's `pydoc_data.topics`, plain SGD, the same weights, batches and
learning rate for all methods. Under momentum and AdamW some lose far more ([docs/compressors.md](docs/compressors.md)).
*loss* is bits per character on held-out text. *s to target*: training time until fp32's final loss + 2 %. A step's time
is split into compute (the slowest rank's) and sync. Validation is outside the clock.
""",
    "gpu": """
`espresso-mpi gpu-check`: what the GPU support promises, tried on one GPU ([docs/gpu.md](docs/gpu.md)). *of bound*: the
time of the least bytes that a method must read and write, at the rate of a copy, over the method's time.
""",
    "optimizers": """
`make bench-optimizers`. A GPT is trained with PyTorch on the text in `pydoc_data.topics`, by every method with the same
weights, batches and learning rates: AdamW as PyTorch has it (betas 0.9 and 0.999, weight decay 0.01), and SGD with
momentum 0.9 or, where the method has a momentum of its own (`dgc`), without. The peak learning rate *lr* follows a
warm-up and a cosine; it was chosen with fp32 and not again for each method. *loss* is bits per character on held-out
text, *spread* the largest less the smallest over the seeds. *vs fp32* compares runs of the same optimizer, learning
rate and seed: the mean, and the range *over seeds*. The runs are short, and of one model: take orders from them, not
digits. Runs that differ in rounding alone come to differ by as much as fp16 and int8 do here, so less says nothing.
""",
    "accuracy": """
`espresso-mpi bench accuracy` ([docs/time-to-accuracy.md](docs/time-to-accuracy.md)). A network is trained with
PyTorch by all ways from the same weights, on the same batches and with the same learning rates. *loss* is that of
validation at the end, the mean over the seeds, and *spread* the largest less the smallest. The target is the loss of
fp32 + 0.5 %. *s to target* and *to target* are the training clock, without validation, and what a rank has sent, at the
first validation at which the mean of the seeds was there.
""",
    "planner": """
`espresso-mpi bench planner`, without MPI: models and clusters are descriptions ([docs/planner.md](docs/planner.md)).
Steps are simulated, in the order `schedule` unless a table says otherwise; times of deciding are measured here.
""",
    "validate": """
Training steps as the planner predicts them and as they were measured. Predictions are made from a profile of this
cluster and from the workload of the training, both recorded before, in other sessions; then all methods of a case
train in turns. *calls*: gradients are synchronised at the end of the backward pass (`sync`) or pushed as they come
(`push`).
*error* is of the prediction; *bias*: the median of the errors with their signs. *computing*: how long it took until all
gradients were there, over the recorded time: with `sync` it shows how far the node's speed changed in between.
*time / best*: over the quickest method measured; *auto / best*: that of what `plan="auto"` chose.
""",
}
"""What is said of the results of each suite, by its name."""
