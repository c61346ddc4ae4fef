"""Train a small transformer of Hugging Face by accelerate, with compressed gradients. Nothing is downloaded.

espresso-mpi run -n 2 -- python -m mpi4py examples/train_accelerate.py

It needs: pip install torch accelerate transformers
"""

import argparse

import torch
import torch.distributed
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import espresso_mpi
import espresso_mpi.torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--compressor", default="int8")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

session = espresso_mpi.Session(compressor=args.compressor)
torch.distributed.init_process_group("espresso")
accelerator = Accelerator(cpu=True)
espresso_mpi.torch.hook_accelerator(accelerator, session)

torch.manual_seed(0)
ends = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=args.width, n_layer=2, n_head=4, **ends))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)

torch.manual_seed(100 + accelerator.process_index)  # every rank has its own data
for step in range(args.steps):
    first = torch.randint(0, 64, (8, 1))
    text = (first + 7 * torch.arange(32) ** 2) % 64  # a rule that the model can learn
    loss = model(input_ids=text, labels=text).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == args.steps - 1:
        accelerator.print(f"step {step:3}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")

accelerator.end_training()  # destroys the process group
session.close()
