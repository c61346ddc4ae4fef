"""Train a small language model in PyTorch: without DDP, with its hook, or sharded by FSDP2; gradients are compressed.

espresso-mpi run -n 2 -- python -m mpi4py examples/train_torch.py --way sync
espresso-mpi run -n 2 -- python -m mpi4py examples/train_torch.py --way ddp
espresso-mpi run -n 2 -- python -m mpi4py examples/train_torch.py --way fsdp

It needs: pip install torch
"""

import argparse
import time

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import espresso_mpi
import espresso_mpi.torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--way", choices=["sync", "ddp", "fsdp"], default="sync")
parser.add_argument("--compressor", default="int8")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
args = parser.parse_args()

VOCABULARY, LENGTH, BATCH = 64, 32, 8


class Language(torch.nn.Module):
    """A causal transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(LENGTH, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        h = self.token(x) + self.place(torch.arange(LENGTH))
        return self.head(self.body(h, mask=mask, is_causal=True))


session = espresso_mpi.Session(compressor=args.compressor)
torch.distributed.init_process_group("espresso")
rank = torch.distributed.get_rank()
torch.set_num_threads(1)
torch.manual_seed(0)
model = Language(args.width, args.layers)

if args.way == "sync":
    run, sync = model, espresso_mpi.torch.GradientSync(model, session)
elif args.way == "ddp":
    run = DistributedDataParallel(model)
    run.register_comm_hook(session, espresso_mpi.torch.ddp_hook)
else:
    for layer in model.body.layers:
        fully_shard(layer)
    run = fully_shard(model)
    espresso_mpi.torch.ShardSync(model, session)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(100 + rank)  # every rank has its own data
began = time.perf_counter()
for step in range(args.steps):
    first = torch.randint(0, VOCABULARY, (BATCH, 1))
    text = (first + 7 * torch.arange(LENGTH + 1) ** 2) % VOCABULARY  # a rule that the model can learn
    optimizer.zero_grad()
    logits = run(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    if args.way == "sync":
        sync.wait()
    optimizer.step()
    if step % 20 == 0 or step == args.steps - 1:
        mean = session.allreduce(loss.detach().clone().reshape(1), name="loss").item()
        if rank == 0:
            print(f"step {step:3}: loss {mean:.3f}, {1e3 * (time.perf_counter() - began) / (step + 1):.0f} ms per step")

torch.distributed.destroy_process_group()
session.close()
