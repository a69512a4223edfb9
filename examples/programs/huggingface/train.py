"""Train a tiny random GPT-2 of transformers to count, on any number of ranks."""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds that each step takes longer")
parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in out/")
options = parser.parse_args()


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(options.sleep)

    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.4f}", flush=True)


set_seed(0)
torch.set_num_threads(1)
counts = [torch.arange(start, start + 16) % 32 for start in range(256)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": count, "labels": count} for count in counts],
    callbacks=[Report()],
)
trainer.train(resume_from_checkpoint=options.resume)
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), "out/weights.pt")
