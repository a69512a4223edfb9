"""The Trainer of Hugging Face transformers with ``hpc_train.session``.

    from hpc_train import session
    from hpc_train.session.transformers import SessionCallback

    trainer = Trainer(..., callbacks=[SessionCallback()])
    trainer.train(resume_from_checkpoint=session.latest())

Checkpoints are the Trainer's own: model, optimizer, scheduler, generators of all ranks and
``trainer_state.json``. ``save_strategy`` and ``save_steps`` set how often; a stop adds one. The script also
runs without hpc-train's launcher. Weights are bitwise those of an undisturbed run if the model's operations
are deterministic. The Trainer does not save the losses since its last log, so the first row after a resume
averages the steps since the resume.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hpc_train import session
from hpc_train.session.reports import Reports, say_stop

try:
    from transformers import PreTrainedModel  # noqa: F401  (imports torch: without it, Trainer can't either)
    from transformers.trainer_callback import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ImportError(
        f"hpc_train.session.transformers needs {error.name}: pip install 'hpc-train[hf]' 'accelerate>=1.10'"
    ) from error

__all__ = ["SessionCallback"]


class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Commits the Trainer's checkpoints to the run; saves and ends the script when it is to stop.

    At a stop the script ends by SystemExit out of ``train``, with exit code 0, so code after ``train`` sees
    completed training only. A save at the last step of an epoch waits for the evaluation after it.
    """

    def __init__(self) -> None:
        self._reports = Reports()
        self._is_stopping = self._waits = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Handle signals from here on."""
        session._session.handle_signals()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save if the script is to stop."""
        self._reports.progress(state.global_step, state.max_steps)
        session.heartbeat()
        if state.global_step < state.max_steps:
            self._is_stopping = session.should_stop(state.global_step)
        control.should_save = control.should_save or self._is_stopping
        if control.should_save and state.epoch == int(state.epoch):
            control.should_save, self._waits = False, True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save what the epoch's last step has left."""
        control.should_save = control.should_save or self._waits
        self._waits = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Record what the Trainer logs, but not its summary at the end."""
        if logs and "train_runtime" not in logs:
            self._reports.add(state.global_step, logs)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commit the checkpoint; end the script if it is to stop."""
        step = state.global_step
        self._reports.send()
        if args.distributed_state is not None:
            args.distributed_state.wait_for_everyone()  # each rank has written its generators' states
        with session.checkpoint(step) as folder:
            if session._session.rank == 0:
                source = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
                shutil.copytree(source, folder, copy_function=_link, dirs_exist_ok=True)
        if self._is_stopping:
            say_stop(step)
            raise SystemExit(0)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Send the last row."""
        self._reports.send()


def _link(source: str, target: str) -> str:
    """Give a file a second name; copy it if the run's folder is on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
