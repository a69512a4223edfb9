"""Classify scikit-learn's digits with Lightning, on any number of ranks."""

import argparse
import os
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_train.session.lightning import SessionCallback, SessionEnvironment, latest

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds that each step takes longer")
parser.add_argument("--resume", action="store_true", help="continue from out/last.ckpt")
options = parser.parse_args()


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        time.sleep(options.sleep)
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self.network(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


seed_everything(0)
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
checkpoint = ModelCheckpoint("out", save_last=True, every_n_train_steps=options.save_every)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    max_steps=options.steps,
    log_every_n_steps=1,
    callbacks=[checkpoint, SessionCallback(every_n_steps=options.save_every)],
    plugins=[SessionEnvironment()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(
    model,
    DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True),
    DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=32),
    ckpt_path=latest(),
)
if trainer.is_global_zero:
    torch.save(model.state_dict(), "out/weights.pt")
