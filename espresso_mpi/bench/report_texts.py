"""The texts of the report ``bench report``: what its columns mean, and how its results were made."""

HEAD = """# Benchmarks

`make bench` writes this file. Compare ratios within one run: the methods take turns in every repetition, so that noise
on the node affects all of them. Absolute times hold for this node only.
"""

COLUMNS = """
## What the columns mean

Every rank has one float32 array of each size.

- *median* and *p99* are over the repetitions. The slowest rank of each repetition counts.
- *x fp32* and *x MPI fp16* are the time of the quickest `MPI_Allreduce` on the same array, divided by the time of the
  method. MPI reduces the array as it is or cast to float16. *x our fp16* is the same for our `fp16`. Below 1, the
  method is slower.
- Rows of MPI: one row is the library's own choice of algorithm, in place. The row `-tuned` is the quickest of all
  others, which trials before the run have found; *route* names it. With Open MPI, these are the six algorithms of the
  component `tuned`, each in place and with two buffers, and its own choice with two buffers. In float16, casts and sum
  are compiled, because MPI's own half type is slower. Rows with the name of another library are from another run,
  minutes apart, so compare them less closely.
- *algbw* and *busbw* are as in NVIDIA's nccl-tests. *algbw* is the bytes of the float32 array over the median time.
  *busbw* is *algbw* times 2(p-1)/p for p ranks, the share of the array that each rank of an allreduce must send.
  Compression raises both.
- *cpu* is the processor time of all ranks together, polling included, per GB of the float32 arrays of all ranks.
- *kernels* is the share of it that encodes and decodes alone take, each run by itself, without the time of a call. It
  can be above 100 %: a synchronisation encodes and decodes what its sums have just read.
- *wire* is the least time on the busiest link: the bytes that a node sends to others, over the best rate of a plain
  stream between nodes in the same run.
- *memory* is the least time for what the ranks of a node must read and write along the route
  (`espresso_mpi/bench/bound.py` has the formulas). The rate is that of plain copies or sums by all ranks at once in the
  same run, whichever moved more.
- The *bound* is the larger of *wire* and *memory*. No implementation of the route on this node is quicker, except by
  caches and by the start of a link. MPI does not report its algorithm, so its bound is that of the allreduce with the
  fewest bytes, flat or by levels, with casts. *time / bound* is the time of the method over its bound.
- *between nodes* is what all ranks together send over links in one synchronisation.
- *wrong* counts elements that differ from the reference. For dense methods, this is the float64 mean. For compressed
  methods, it is the sum of the decoded payloads, bit for bit.

On the emulated cluster, all nodes share one memory. A link that has paused lets the first 2 ms of data (250 kB at 1
Gbit) pass at full speed. Smaller sizes therefore show latency only, and can be below the bound.
"""

LOSSES = """
## Where compression loses

This list has all methods that took longer than the quickest average of the same array in the same run. *Against fp32*,
this is `MPI_Allreduce` of float32 by the quickest of its algorithms, or our `none`. `none` is in the list itself if MPI
was quicker. *Against fp16*, it is `MPI_Allreduce` of float16, with casts, or our `fp16`. This is the fair baseline for
methods that lose more than a cast does. For another library, it is the quicker of its float32 and float16.

"""

SECTIONS = {
    "tensors": """
One call synchronises all gradients of a network, in the order of a backward pass. *fused* is `MPI_Allreduce` of one
buffer as large as all of them, without the copies into and out of it. *each* is one `MPI_Allreduce` per tensor. With
*time / fused* above 1, the method is slower than the one buffer. With *x each* above 1, it is quicker than one call per
tensor. *cpu*, *kernels* and *wrong* are as above.
""",
    "torch": """
One step of training has a forward pass, a backward pass, a synchronisation, and AdamW. All rows take turns. *gloo* is
DDP over gloo. *ddp* is DDP over the process group of this library with its hook. *push* is `GradientSync`, and *sync*
is `GradientSync` without overlap. *exposed* is the time beyond a step that only computes. */ gloo* is the time over
that of DDP over gloo with torch's hook of the same kind, or without a hook if torch has none.
""",
    "overlap": """
In each step, the main thread multiplies matrices, and pushes each gradient when its share of the products is done.
*T_c* is the time of the products alone. Each method has as many products as take about *T_s*. *T_s* is one sync of all
tensors alone. *largest* is a sync of the largest tensor alone, in turns with the step. *allowed* is 1.15 · max(T_c,
T_s) + largest. *hidden* is the share of the shorter of T_c and T_s that the other one hides. Below 0, pushing takes
longer than the products followed by one sync. With one rank per core, encodes, sums and the network stack use the core
that computes, so only waits for the network can be hidden. *Python slowed* is by how much work in pure Python takes
longer if all gradients are pushed just before. Alone, it takes about as long as T_s. *it waits* is how much longer its
thread does not run meanwhile, as a share of the work: it waits for its core or for the interpreter lock. *by CPU* is
the processor time of the other threads. With one core per rank, the thread waits for them; if it waits longer, that is
the interpreter lock. By the rest of *Python slowed*, its thread runs longer for the same work: the network stack
interrupts it, and the caches are not its own. *wrong* counts elements in which pushing differs from one sync. The
method *sockets* moves the bytes of a dense sum through plain sockets by two threads, all of them from the beginning of
a step on, and adds nothing: on these cores and links, it shows what the network stack alone leaves to hide.
""",
    "scaling": """
The fit is t = α + β · bytes, by least squares of relative errors. *deviation* is their root mean square. α is the cost
of a call, and 1/β is the rate of float32 input that large arrays approach. *algbw* and *busbw* are those of the largest
size. *wrong* counts elements of arrays of at most 16 MiB. The cell is empty if the run did not count them.
""",
    "collectives": """
Every collective takes turns with MPI's own blocking call on the same buffers. *size* is that of the largest array of a
rank. *median* and *p99* are over the repetitions, and the slowest rank of each repetition counts. *MPI* is the median
of MPI's call, and *best / best* compares the least times. *algbw* is the size over the median. *busbw* is *algbw* times
2(p-1)/p for an allreduce over p ranks, 1 for reduce and broadcast, and (p-1)/p for all others. *wrong* counts elements
that differ from the exact result, over all ranks. *sent* is what all ranks together send in a compressed call. *beyond
expected* is the part of *sent* that exceeds the sizes of the payloads along the route.
""",
    "compressors": """
`make bench-compressors` makes these tables. GB/s count float32 input, in the median and in the *best* repetition. *of
bound* is the least time of the method's memory traffic over the best time of the method. The least time is at the best
rate of the plain kernels in the first rows. *read*, *update* and *accumulate* move 4, 8 and 12 bytes per element.
*copy* counts 8, but the processor reads a cache line before it writes it, so *copy* is below the others. The large
arrays are four times the last-level cache, and caches are emptied before each call. The small arrays are timed after
four calls in a row, as if a gradient had just been computed. Memory does not bound them. Encodes include the residual,
which is eight of the twelve bytes per element that they read and write. Rows of methods that refuse error feedback say
so. *vNMSE* is ‖x − C(x)‖²/‖x‖² on normal values, and *expected* is its value by analysis. *call* is the time to encode
one element.
""",
    "train": """
A character language model learns the English text in Python's `pydoc_data.topics` by plain SGD. All methods have the
same weights, batches and learning rate. Under momentum and AdamW, some lose far more
([docs/compressors.md](docs/compressors.md)). *loss* is bits per character on held-out text. *s to target* is the
training time until the final loss of fp32 + 2 %. The time of a step is split into *compute*, that of the slowest rank,
and *sync*. The clock stops during validation.
""",
    "gpu": """
`espresso-mpi gpu-check` tested on one GPU what the documentation promises ([docs/gpu.md](docs/gpu.md)). *of bound* is
the time of the fewest bytes that a method must read and write, at the rate of a copy, over the time of the method.
""",
    "optimizers": """
`make bench-optimizers` makes this table. A GPT is trained with PyTorch on the text in `pydoc_data.topics`. All methods
have the same weights, batches and learning rates. AdamW has PyTorch's defaults (betas 0.9 and 0.999, weight decay
0.01). SGD has a momentum of 0.9, or none if the method has its own (`dgc`). The learning rate has a warm-up and then
follows a cosine. Its peak *lr* was chosen with fp32, and not again for each method. *loss* is bits per character on
held-out text, and *spread* is the largest minus the smallest loss over the seeds. *vs fp32* compares runs of the same
optimizer, learning rate and seed. It has the mean and the range *over seeds*. The runs are short and of one model, so
use the order of the methods, not the digits. Runs that differ only in rounding differ by as much as fp16 and int8 do
here. Smaller differences mean nothing.
""",
    "accuracy": """
`espresso-mpi bench accuracy` makes this table ([docs/time-to-accuracy.md](docs/time-to-accuracy.md)). A network is
trained with PyTorch in each row from the same weights, on the same batches and with the same learning rates. *loss* is
the validation loss at the end, as the mean over the seeds. *spread* is the largest minus the smallest loss. The target
is the loss of fp32 + 0.5 %. *s to target* is the training time, without validation, until the first validation at which
the mean over the seeds has reached the target. *to target* is what a rank has sent by then.
""",
    "planner": """
`espresso-mpi bench planner` makes these tables without MPI, from descriptions of models and clusters
([docs/planner.md](docs/planner.md)). Steps are simulated, in the order `schedule` unless a table names another. The
times of the planner were measured on this node.
""",
    "validate": """
The tables compare predicted training steps with measured ones. The predictions use a profile of this cluster and the
workload of the training, which other sessions recorded before. Then all methods of a case train in turns.

- *calls*: gradients are synchronised at the end of the backward pass (`sync`) or pushed as they come (`push`).
- *error* is the error of the prediction, and *bias* is the median of the errors with their signs.
- *computing* is the time until all gradients were ready, over the recorded time. With `sync`, it shows how much the
  speed of the node changed in between.
- *time / best* is the time over that of the quickest method. *auto / best* is this ratio for the choice of
  `plan="auto"`.
""",
}
"""What is said of the results of each suite, by its name."""
