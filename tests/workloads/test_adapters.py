"""Lightning, transformers and Accelerate in ``hpc_train.session``: stopped scripts resume bitwise."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpc_train import session
from hpc_train.session.reports import Reports
from hpc_train.session.storage import Saving

EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work in an empty folder without a launcher; return the rows that are logged."""
    logged: list[tuple[int, dict[str, float]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_session", session.SessionState())
    monkeypatch.setattr(session, "log", lambda step, **metrics: logged.append((step, metrics)))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield logged
    for number, handler in before.items():
        signal.signal(number, handler)


def test_metrics_of_one_step_are_one_row(rows: Any) -> None:
    reports = Reports()
    reports.add(1, {"loss": 2, "epoch": 0.1, "note": "text"})
    reports.add(1, {"val_loss": 3})
    assert rows == []
    reports.add(2, {"loss": 1.5})
    assert rows == [(1, {"loss": 2.0, "val_loss": 3.0})]
    reports.send()
    reports.send()
    reports.add(2, {"loss": torch.tensor(1.5), "lr": torch.tensor(0.5), "images": torch.zeros(2)})
    reports.send()
    assert rows[1:] == [(2, {"loss": 1.5}), (2, {"lr": 0.5})]


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(name: str) -> None:
    program = f"import sys; sys.modules['{name}'] = None; import hpc_train.session.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert f"hpc_train.session.{name} needs {name}" in last and "pip install '" in last


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))


# Lightning.


class Network:
    """Makes Lightning modules with dropout; one raises SIGTERM at a batch."""

    def __new__(cls, stop_at: int | None = None) -> Any:
        from lightning.pytorch import LightningModule

        class Module(LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layers = layers()
                self.batches = 0

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.batches += 1
                if self.batches == stop_at:
                    signal.raise_signal(signal.SIGTERM)
                loss = self.layers(batch[0]).square().mean()
                self.log("loss", loss)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", self.layers(batch[0]).square().mean())

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        return Module()


def fit(tmp_path: Path, stop_at: int | None = None, workers: int = 0, **options: Any) -> Any:
    """Train for three epochs of eight batches, or until the signal; return the module."""
    from lightning.pytorch import Trainer

    from hpc_train.session.lightning import SessionCallback, SessionEnvironment, latest

    session._session = session.SessionState()
    module = Network(stop_at)
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"default_root_dir": tmp_path, "num_sanity_val_steps": 0}
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, log_every_n_steps=1,
        callbacks=[SessionCallback()], plugins=[SessionEnvironment()], **quiet, **options,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, DataLoader(data, batch_size=16), ckpt_path=latest())
    return module


def weights(module: Any) -> list[Any]:
    return [value.tolist() for value in module.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_at", "options"),
    [
        (3, {}),
        (8, {}),  # the epoch's last batch
        (12, {"val_check_interval": 4}),  # a validation follows
        (13, {"val_check_interval": 4, "accumulate_grad_batches": 2}),
        (11, {"max_steps": 20}),
        (11, {"workers": 2}),
        (24, {}),  # the last step: nothing is left to stop
    ],
)
def test_lightning_stops_and_resumes_with_the_same_weights_and_rows(
    stop_at: int, options: dict[str, Any], rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quiet").mkdir()
    monkeypatch.chdir(tmp_path / "quiet")
    quiet = fit(tmp_path, **options)
    expected, rows[:] = list(rows), []
    saved, begin = list[tuple[int, int]](), Saving.begin
    monkeypatch.setattr(
        Saving, "begin", lambda self, step: saved.append((step, rows[-1][0])) or begin(self, step)
    )
    monkeypatch.chdir(tmp_path)
    if stop_at == 24:
        assert weights(fit(tmp_path, stop_at, **options)) == weights(quiet)
        return
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, stop_at, **options)
    assert ended.value.code == 0 and 0 < len(rows) < len(expected)
    assert saved and all(step == row for step, row in saved), "a checkpoint has the rows up to its step"
    before = len(rows)
    assert weights(fit(tmp_path, **options)) == weights(quiet)
    assert rows[before][0] == rows[before - 1][0] + 1
    assert rows == expected


def test_a_trainer_that_expects_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.session.lightning import SessionEnvironment

    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    environment = SessionEnvironment()
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    environment.validate_settings(2, 2)
    with pytest.raises(ValueError, match="devices=2, num_nodes=2"):
        environment.validate_settings(2, 1)


# transformers.


def train(tmp_path: Path, stop_at: int | None = None, **options: Any) -> Any:
    """Train for two epochs of eight steps, or until the signal; return the model."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from hpc_train.session.transformers import SessionCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step + 1 == stop_at:
                signal.raise_signal(signal.SIGTERM)

    session._session = session.SessionState()
    torch.manual_seed(0)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(256).reshape(32, 8) % 16]
    arguments = {
        "use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 4, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    } | options  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=1))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path / "out"), **arguments),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[SessionCallback(), Stop()],
    )
    trainer.train(resume_from_checkpoint=session.latest())
    return model


def learned(rows: Any) -> list[Any]:
    """Return the rows without times."""
    timed = ("runtime", "per_second")
    return [
        (step, {name: value for name, value in metrics.items() if not name.endswith(timed)})
        for step, metrics in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_at", "options"),
    [
        (3, {}),
        (8, {"eval_strategy": "epoch"}),  # the epoch's last step
        (3, {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}),
        (16, {}),  # the last step: nothing is left to stop
    ],
)
def test_the_trainer_of_transformers_stops_and_resumes_with_the_same_weights_and_rows(
    stop_at: int, options: dict[str, Any], rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quiet").mkdir()
    monkeypatch.chdir(tmp_path / "quiet")
    quiet = train(tmp_path / "quiet", **options)
    expected, rows[:] = learned(rows), []
    monkeypatch.chdir(tmp_path)
    if stop_at == 16:
        assert weights(train(tmp_path, stop_at, **options)) == weights(quiet)
        return
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, stop_at, **options)
    assert ended.value.code == 0 and 0 < len(rows) < len(expected)
    assert weights(train(tmp_path, **options)) == weights(quiet)
    assert learned(rows) == expected


# Accelerate.


def accelerate_script(steps: int, stop_at: int | None = None) -> list[Any]:
    """Train as docs/programs.md shows; return the weights, or [] after a stop."""
    from accelerate import Accelerator

    session._session = session.SessionState()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = layers()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    done = 0
    if folder := session.latest():
        accelerator.load_state(folder)
        done = int(folder.name.removeprefix("step-"))
    for step in range(done + 1, steps + 1):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        if session.should_stop(step):
            with session.checkpoint(step) as folder:
                accelerator.save_state(folder)
            return []
    return weights(model)


@pytest.mark.slow
def test_a_state_of_accelerate_is_restored_bitwise(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.should_stop(0)  # handles the signal
    assert accelerate_script(9, stop_at=4) == []
    resumed = accelerate_script(9)
    (tmp_path / "quiet").mkdir()
    monkeypatch.chdir(tmp_path / "quiet")
    assert resumed == accelerate_script(9)


# The examples: on two ranks in test_examples.py.


@pytest.mark.parametrize("name", ["lightning", "huggingface"])
def test_the_lines_on_the_page_are_those_of_the_example(name: str) -> None:
    page = (EXAMPLES.parents[1] / "docs" / "programs.md").read_text()
    (block,) = (
        text for text in page.split("```text\n")[1:] if f"programs/{name}/" in page.split(text)[0][-300:]
    )
    shown = [line[1:].strip() for line in block.partition("```")[0].splitlines() if line.startswith("+")]
    plain, with_session = (
        [line.strip() for line in (EXAMPLES / name / file).read_text().splitlines()]
        for file in ("train.py", "train_session.py")
    )
    assert sorted(shown) == sorted(line for line in set(with_session) - set(plain) if line)
    assert len(shown) <= 5
