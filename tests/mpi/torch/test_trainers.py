"""Lightning, accelerate and the Trainer of transformers with compressed gradients. Skipped without these packages."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.errors import ConfigError, RemoteError

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("espresso_mpi.torch")

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread", "group")]


def data():
    torch.manual_seed(3)
    x = torch.randn(256, 8)
    return torch.utils.data.TensorDataset(x, (x.square().sum(1) < 8).long())


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))


def weights(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def equal_on_all(world, model):
    return len(set(world.allgather(weights(model).tobytes()))) == 1


# --- Lightning --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fit(world, tmp_path_factory):
    """fit(epochs, strategy, path=None): the trained module and its trainer."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, number):
            self.before(number)
            loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(epochs, strategy, path=None, before=lambda number: None, devices=world.size, plugins=None):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, plugins=plugins,
        )  # fmt: skip
        module = Module()
        module.before = before
        trainer.fit(module, torch.utils.data.DataLoader(data(), 16), ckpt_path=path)
        return module, trainer

    return run


def strategy(*arguments, **more):
    from espresso_mpi.torch.lightning import EspressoStrategy

    return EspressoStrategy(*arguments, **more)


def test_lightning_with_a_loss_scale(world, fit):
    """The session skips overflows, and its residuals follow the scaler of the precision."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)

    module, trainer = fit(1, strategy("int4", options={"min_bytes": 0}), plugins=plugin)
    assert trainer.strategy.session.nonfinite == "skip_all" and scaler.get_scale() > 16
    assert equal_on_all(world, module)
    with pytest.raises(ConfigError, match="follows another GradScaler"):
        adapter.follow_scaler(trainer.strategy.session, torch.amp.GradScaler("cpu"))


def test_lightning_compresses_and_goes_on(world, fit, tmp_path_factory):
    folder = world.bcast(str(tmp_path_factory.mktemp("lightning")) if world.rank == 0 else None)
    once, trainer = fit(4, strategy("onebit", options={"min_bytes": 0}))
    session = trainer.strategy.session
    assert equal_on_all(world, once) and "layers.0.weight" in session.stats().tensors
    assert any("layers.0.weight" in key for key in session.state_dict()["arrays"])
    dense, _ = fit(4, strategy())
    assert 0 < np.linalg.norm(weights(once) - weights(dense)) < 0.2 * np.linalg.norm(weights(dense))
    _, trainer = fit(2, strategy("onebit", options={"min_bytes": 0}))
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    again, _ = fit(4, strategy("onebit", options={"min_bytes": 0}), f"{folder}/two.ckpt")
    assert np.array_equal(weights(again), weights(once)), "the residuals were not loaded"


def test_lightning_on_other_ranks_than_mpi(world, fit):
    with pytest.raises(ConfigError, match=rf"devices={world.size + 1}.*MPI started {world.size}"):
        fit(1, strategy("int8"), devices=world.size + 1)
    with pytest.raises(ConfigError, match="got a session"):
        strategy("int8", session=object())


# --- accelerate -------------------------------------------------------------------------------------------------------


def test_accelerate_compresses(world, open_session):
    accelerate = pytest.importorskip("accelerate")
    session = open_session(compressor="int8", min_bytes=0)
    accelerator = accelerate.Accelerator(cpu=True)
    adapter.hook_accelerator(accelerator, session)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        x, inside = data()[64 * step + 8 * world.rank : 64 * step + 8 * world.rank + 8]
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), inside))
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_all(world, model) and set(session.stats().tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(ConfigError, match="99 process"):
        adapter.hook_accelerator(SimpleNamespace(num_processes=99), session)


def test_the_trainer_of_transformers(world, open_session, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": (t := (k + torch.arange(16)) % 32), "labels": t} for k in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=4, per_device_train_batch_size=4, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    session = open_session(compressor="int8", min_bytes=0)
    adapter.hook_accelerator(trainer.accelerator, session)
    before = weights(model)
    trainer.train()
    assert equal_on_all(world, model) and not np.array_equal(before, weights(model))
    assert session.stats().tensors["transformer.h.0.attn.c_attn.weight"].steps == 4


# --- at last, because the process group has failed then ---------------------------------------------------------------


def test_an_exception_in_lightning_is_heard(world, fit):
    """The other ranks fail at once, where they would wait for minutes."""

    def before(number):
        if number == 2 and world.rank == 0:
            raise ValueError("step 2 went wrong")

    with pytest.raises(ValueError if world.rank == 0 else RemoteError, match="step 2 went wrong"):
        fit(1, strategy("int8"), before=before)
