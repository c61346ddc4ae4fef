"""Train a small network by Lightning, with compressed gradients.

espresso-mpi run -n 2 -- python -m mpi4py examples/train_lightning.py

It needs: pip install torch lightning
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

from espresso_mpi.torch.lightning import EspressoStrategy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--compressor", default="int8")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()


class Classifier(LightningModule):
    """Says whether a point lies inside a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 2))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, inside = batch
        loss = torch.nn.functional.cross_entropy(self.layers(x), inside)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


seed_everything(0, verbose=False)
x = torch.randn(4096, 8)
batches = DataLoader(TensorDataset(x, (x.square().sum(1) < 8).long()), batch_size=64, shuffle=True)
nodes = len(set(MPI.COMM_WORLD.allgather(MPI.Get_processor_name())))
trainer = Trainer(
    accelerator="cpu",
    devices=MPI.COMM_WORLD.size // nodes,
    num_nodes=nodes,
    strategy=EspressoStrategy(args.compressor),
    max_epochs=args.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), batches)
