"""Lightning with ``hpc_train.session``: a callback, a cluster environment and the path to resume from.

    from hpc_train.session.lightning import SessionCallback, SessionEnvironment, latest

    trainer = Trainer(..., callbacks=[SessionCallback(every_n_steps=1000)], plugins=[SessionEnvironment()])
    trainer.fit(model, loader, ckpt_path=latest())

Steps are optimizer steps, or with manual optimization batches, counted from 1. The script also runs without
hpc-train's launcher. Bitwise on resume, in the middle of an epoch too: weights, optimizers, schedulers, the
generators of all ranks, and the order of a map-style ``DataLoader``. Not restored, because Lightning doesn't
save them or worker processes own them: sums of ``self.log(..., on_epoch=True)`` of the epoch's first part,
random augmentations in loader processes, and the position of an ``IterableDataset`` without ``state_dict``.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_train import session
from hpc_train.session.reports import Reports, say_stop

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins.environments import LightningEnvironment
except ModuleNotFoundError as error:
    raise ImportError(
        f"hpc_train.session.lightning needs {error.name}: pip install 'lightning>=2.5' "
        "(the package lightning; classes of pytorch_lightning are others)"
    ) from error

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["SessionCallback", "SessionEnvironment", "latest"]

_CHECKPOINT = "lightning.ckpt"


def latest() -> str | None:
    """Return the ``ckpt_path`` of the newest intact checkpoint; None if there is none. Collective."""
    if "RANK" not in os.environ:  # Lightning has not started the other ranks, or has and this is one
        session._session.set_ranks(0, 1)
    folder = session.latest()
    return None if folder is None else str(folder / _CHECKPOINT)


class SessionEnvironment(LightningEnvironment):  # type: ignore[misc]
    """The ranks that hpc-train's launcher or torchrun has started; without one, Lightning starts them.

    It takes the place of ``SLURMEnvironment``, so that Lightning neither requeues the job nor reads Slurm's
    variables. Raises ValueError if the Trainer's ``devices`` and ``num_nodes`` are not those of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(os.environ["WORLD_SIZE"] if self._is_launched else super().world_size())

    def global_rank(self) -> int:
        """Return this process's rank."""
        return int(os.environ["RANK"] if self._is_launched else super().global_rank())

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if the Trainer expects other ranks than there are."""
        if self._is_launched and num_devices * num_nodes != self.world_size():
            per_node = os.environ.get("LOCAL_WORLD_SIZE", "?")
            nodes = os.environ.get("GROUP_WORLD_SIZE", "?")
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}), but {self.world_size()} ranks; "
                f"write devices={per_node}, num_nodes={nodes} (LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE)"
            )

    def teardown(self) -> None:
        """Keep the launcher's variables for a second Trainer."""
        if not self._is_launched:
            super().teardown()


class SessionCallback(Callback):  # type: ignore[misc]
    """Saves and ends the script when it is to stop; saves, logs and shows progress before.

    ``every_n_steps``: steps between checkpoints; None saves at a stop and at the end of training only.
    Checkpoints are those of ``trainer.save_checkpoint``. At a stop the script ends by SystemExit out of
    ``fit``, with exit code 0, so code after ``fit`` sees completed training only. A step after which
    Lightning validates or ends the epoch is not saved, but the next one: Lightning can't resume between.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps {every_n_steps}: write a number of steps from 1, or None")
        self._every = every_n_steps
        self._reports = Reports()
        self._loaders: list[_PositionedSampler] = []
        self._handlers: dict[int, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._saved = self._seen = 0
        self._was_boundary = self._is_stopping = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Handle signals, follow the position of training data, and run after the other callbacks."""
        session._session.set_ranks(trainer.global_rank, trainer.world_size)
        if stage != "fit":
            return
        session._session.handle_signals()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
        trainer.callbacks = [other for other in trainer.callbacks if other is not self] + [self]
        process = trainer.strategy.process_dataloader

        def positioned(loader: Any) -> Any:
            return self._with_position(trainer, process(loader)) if trainer.training else process(loader)

        trainer.strategy.process_dataloader = positioned

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take back the signals."""
        self._take_signals()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take back the signals, log to the session, and continue the generators' sequences."""
        self._take_signals()
        trainer.loggers = [*trainer.loggers, _SessionLogger(self._reports, trainer.default_root_dir)]
        self._saved = self._seen = trainer.fit_loop.epoch_loop._batches_that_stepped
        if resumed := self._resumed_states(trainer):
            _set_random_states(resumed["generators"])
            if "device" in resumed:
                _device_module(trainer).set_rng_state(resumed["device"])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """End the script if the previous step was the last one; its metrics have been logged."""
        if self._is_stopping:
            self._reports.send()
            say_stop(self._saved)
            raise SystemExit(0)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the script is to stop, or a checkpoint is due."""
        loop = trainer.fit_loop.epoch_loop
        session.heartbeat()
        if loop._should_accumulate():
            return
        step = self._seen = loop._batches_that_stepped + 1
        self._reports.progress(step, trainer.estimated_stepping_batches)
        is_boundary = loop._is_training_done or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        # If each step is followed by a validation, none is better than another.
        waits = is_boundary and not self._was_boundary
        self._was_boundary = is_boundary
        if waits or self._is_last(trainer):
            return
        self._is_stopping = session.should_stop(step)
        if self._is_stopping or (self._every is not None and step - self._saved >= self._every):
            connector = trainer._logger_connector
            if (
                connector.should_update_logs
            ):  # Lightning logs them after this hook: too late for the checkpoint
                self._reports.add(step, connector.metrics["log"])
            self._save(trainer, step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end of training."""
        trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, _SessionLogger)]
        self._reports.progress(self._seen, self._seen)
        if self._seen > self._saved:
            self._save(trainer, self._seen)
        self._reports.send()

    def _save(self, trainer: Any, step: int) -> None:
        self._reports.send()
        with session.checkpoint(step) as folder:
            states: dict[str, Any] = {
                "generators": _random_states(),
                "loaders": [loader.start for loader in self._loaders],
            }
            if hasattr(device := _device_module(trainer), "get_rng_state"):
                states["device"] = device.get_rng_state()
            torch.save(states, _random_file(folder, trainer))
            trainer.save_checkpoint(folder / _CHECKPOINT, weights_only=False)
        self._saved = step

    def _is_last(self, trainer: Any) -> bool:
        """Return True if training ends with this step."""
        loop = trainer.fit_loop.epoch_loop
        if not loop._is_training_done:
            return bool(trainer.should_stop)
        is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        return is_last_step or trainer.current_epoch + 1 == trainer.max_epochs or bool(trainer.should_stop)

    def _take_signals(self) -> None:
        """Lightning's handler of SIGTERM raises on each rank at another step, and communicates within."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _resumed_states(self, trainer: Any) -> dict[str, Any] | None:
        if self._resumed is None and trainer.ckpt_path is not None:
            file = _random_file(Path(trainer.ckpt_path).parent, trainer)
            if file.is_file():
                self._resumed = torch.load(file, weights_only=True)
        return self._resumed

    def _with_position(self, trainer: Any, loader: Any) -> Any:
        """Let Lightning save and restore the position of a loader that can't do it by itself."""
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or hasattr(loader, "state_dict")
        ):
            return loader
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        index = len(self._loaders)
        sampler = _PositionedSampler(getattr(loader, name), loader.generator, trainer)

        def load(state: dict[str, Any]) -> None:
            resumed = self._resumed_states(trainer)
            starts = [] if resumed is None else resumed["loaders"]
            sampler.resume(state["batches"], starts[index] if index < len(starts) else None)

        attributes = {name: sampler, "state_dict": sampler.state_dict, "load_state_dict": load}
        for attribute, value in attributes.items():
            object.__setattr__(loader, attribute, value)  # DataLoader refuses another sampler after its start
        self._loaders.append(sampler)
        return loader


class _PositionedSampler:
    """A sampler that can begin an epoch in its middle, with the order that the epoch began with."""

    def __init__(self, sampler: Any, generator: Any, trainer: Any) -> None:
        self._sampler, self._generator, self._trainer = sampler, generator, trainer
        #: The generators' states as the epoch's order was drawn.
        self.start: dict[str, Any] | None = None
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        now = _random_states(self._generator)
        if skip == 0:
            self.start = now
            yield from self._sampler
            return
        self._set_epoch()
        if self.start is not None:
            _set_random_states(self.start, self._generator)
        batches = iter(self._sampler)
        for _ in range(skip):
            next(batches, None)
        _set_random_states(now)
        yield from batches

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the batches of the epoch that training has done; 0 at its end."""
        loop = self._trainer.fit_loop.epoch_loop
        is_end = loop._num_ready_batches_reached()
        return {"batches": 0 if is_end else loop.batch_progress.current.ready}

    def resume(self, batches: int, start: dict[str, Any] | None) -> None:
        """Skip batches at the beginning of the next iteration."""
        self._skip = batches
        self.start = start if batches else None

    def _set_epoch(self) -> None:
        """Loader processes read before Lightning sets the epoch of a resumed run."""
        epoch = self._trainer.fit_loop.epoch_progress.current.processed
        samplers: list[Any] = [self._sampler, getattr(self._sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class _SessionLogger(Logger):  # type: ignore[misc]
    """Passes on what ``self.log`` logs. Lightning counts its steps from 0."""

    #: With these, files of other callbacks are where they would be without this logger.
    name = version = ""

    def __init__(self, reports: Reports, save_dir: str) -> None:
        super().__init__()
        self._reports, self._save_dir = reports, save_dir

    @property
    def save_dir(self) -> str:
        return self._save_dir

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the arguments are in the run's file."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None:
            self._reports.add(step + 1, metrics)


def _random_file(folder: Path, trainer: Any) -> Path:
    return folder / f"random-{trainer.global_rank}.pt"


def _device_module(trainer: Any) -> Any:
    """Return the module of torch for this rank's device; that of the CPU has no generator."""
    return torch.get_device_module(trainer.strategy.root_device)


def _random_states(generator: torch.Generator | None = None) -> dict[str, Any]:
    """Return the states of this rank's generators, as values that ``torch.load`` reads without code."""
    legacy: Any = numpy.random.get_state()
    name, keys, *rest = legacy
    states = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    return states if generator is None else states | {"generator": generator.get_state()}


def _set_random_states(states: dict[str, Any], generator: torch.Generator | None = None) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if generator is not None and "generator" in states:
        generator.set_state(states["generator"])
