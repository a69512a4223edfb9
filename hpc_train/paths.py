"""Where everything lies: the one place that spells the name of a file of a run folder (DESIGN §6)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import UsageError, printable

#: What an experiment may be called: it names a folder, a Slurm job and a wandb group.
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
#: ASCII digits: ``int`` takes others too, and some of what ``str.isdigit`` takes it refuses.
_ATTEMPT_NAME = re.compile(r"[1-9][0-9]{0,8}")
_CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,15})")


def expanded(path: str) -> Path:
    """Return the path with its ``~`` replaced; as it is where this machine knows no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def runs_root() -> Path:
    """Return the folder of all experiments: ``$HPC_TRAIN_RUNS``, else ``runs`` in the current folder."""
    given = Path(os.environ.get("HPC_TRAIN_RUNS") or "runs")
    try:
        return given.expanduser().absolute()
    except RuntimeError as error:
        home = given.parts[0]
        raise UsageError(
            f"HPC_TRAIN_RUNS: {printable(str(given))!r} begins with {printable(home)!r}, and this machine "
            "knows no such home folder; write the folder's full path"
        ) from error


@dataclass(frozen=True)
class CheckpointPaths:
    """The files of one checkpoint folder; it counts only once ``manifest`` is there."""

    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def state(self) -> Path:
        """Everything that is not a tensor, and where each tensor's pieces lie."""
        return self.folder / "state.json"

    def shard(self, rank: int) -> Path:
        return self.folder / f"shard-{rank:05d}.safetensors"

    def shard_index(self, rank: int) -> Path:
        """What one rank wrote into its shard; merged into ``state`` by rank 0, then removed."""
        return self.folder / f"shard-{rank:05d}.json"

    @property
    def step(self) -> int:
        match = _CHECKPOINT_NAME.fullmatch(self.folder.name)
        if match is None:
            raise ValueError(f"{self.folder} is no checkpoint's folder")
        return int(match[1])


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt: from one start of all ranks to their end."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def record(self) -> Path:
        return self.folder / "attempt.json"

    @property
    def rendezvous(self) -> Path:
        """Where rank 0 publishes the address of the store that the others connect to."""
        return self.folder / "rendezvous.json"

    @property
    def events(self) -> Path:
        """When rank 0 did what; merged into ``record`` where that is read."""
        return self.folder / "events.json"

    @property
    def notices(self) -> Path:
        """Lines that rank 0 wants shown to who follows the run: which pretrained weights were loaded."""
        return self.folder / "notices.json"

    @property
    def trial_rendezvous(self) -> Path:
        """As ``rendezvous``, of the processes that try sizes of micro-batches."""
        return self.folder / "trial-rendezvous.json"

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def exit(self, rank: int) -> Path:
        """A rank's exit code, where it is not 0; of those that were only asked to stop rank 0 alone tells."""
        return self.folder / f"rank-{rank}.exit"

    def error(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error"

    def stacks(self, rank: int) -> Path:
        """What every thread of a rank was doing when its watchdog took the attempt for hung."""
        return self.folder / f"rank-{rank}.stacks"

    def flight_record(self, rank: int) -> Path:
        """NCCL's last collectives, as its flight recorder has them, from the same moment."""
        return self.folder / f"rank-{rank}.nccl.json"

    def heartbeat(self, node: str) -> Path:
        """What the ranks of a node were last seen doing."""
        return self.folder / f"heartbeat-{node}.json"

    @property
    def kept_nodes(self) -> Path:
        """Nodes that the next attempt was to leave out, but would not start without; by the batch script."""
        return self.folder / "kept-nodes"

    def bad_samples(self, rank: int) -> Path:
        """Samples that a rank could not read and left out, a line each."""
        return self.folder / f"rank-{rank}.bad_samples.jsonl"


@dataclass(frozen=True)
class SubmissionPaths:
    """The files of one array job: its script, its pickles, what the batch script prints."""

    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / "submission.json"

    @property
    def token(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class ExperimentPaths:
    """What the runs of one experiment share. Hidden: it is no run."""

    folder: Path

    @property
    def submissions(self) -> Path:
        return self.folder / ".slurm"

    @property
    def submission_lock(self) -> Path:
        """Held by the one command that submits."""
        return self.submissions / "lock"

    @property
    def snapshots(self) -> Path:
        """Code by content, shared by this user's experiments.

        In a shared runs folder ``.code`` belongs to its first user; others have ``.code-<uid>``.
        """
        first = self.folder.parent / ".code"
        try:
            is_own = first.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            is_own = True
        return first if is_own else first.with_name(f".code-{os.geteuid()}")

    def submission(self, token: str) -> SubmissionPaths:
        return SubmissionPaths(self.submissions / token)

    def submission_folders(self) -> list[SubmissionPaths]:
        """Return the submissions whose record stands, in no order."""
        try:
            found = [SubmissionPaths(path) for path in self.submissions.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # the last: another user's
            return []
        return [submission for submission in found if submission.record.is_file()]


@dataclass(frozen=True)
class RunPaths:
    """The files of one run."""

    folder: Path

    @property
    def experiment(self) -> Path:
        return self.folder / "experiment.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "run.json"

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def code(self) -> Path:
        return self.folder / "code"

    @property
    def micro_batch(self) -> Path:
        """What ``micro_batch_size: auto`` came to, from the run's first attempt on."""
        return self.folder / "micro_batch.json"

    @property
    def cancelled(self) -> Path:
        """Somebody cancelled the run: it is not requeued, whatever its ranks say. Gone after a resume."""
        return self.folder / "cancelled.json"

    @property
    def siblings(self) -> ExperimentPaths:
        """The folder of all runs of the experiment."""
        return ExperimentPaths(self.folder.parent)

    @property
    def wandb(self) -> Path:
        return self.folder / "wandb"

    @property
    def wandb_sent(self) -> Path:
        """Which rows wandb may have."""
        return self.wandb / "sent.json"

    @property
    def wandb_lock(self) -> Path:
        """Held by the process that talks to wandb for the run."""
        return self.wandb / ".lock"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def attempts(self) -> Path:
        return self.folder / "attempts"

    @property
    def claim_lock(self) -> Path:
        """Held while an attempt is claimed, and while ``clean`` removes files."""
        return self.folder / ".claim.lock"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @classmethod
    def entry_names(cls) -> set[str]:
        """Return the names of everything that this tool puts into a run's folder: of the properties above."""
        run = cls(Path("run"))
        values = [getattr(run, name) for name, kind in vars(cls).items() if isinstance(kind, property)]
        return {value.name for value in values if isinstance(value, Path) and value.parent == run.folder}

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / str(number))

    def checkpoint(self, step: int) -> CheckpointPaths:
        return CheckpointPaths(self.checkpoints / f"step-{step:08d}")

    def checkpoint_folders(self) -> list[CheckpointPaths]:
        """Return the folders named like a checkpoint, committed or not, lowest step first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            CheckpointPaths(path)
            for path in self.checkpoints.iterdir()
            if _CHECKPOINT_NAME.fullmatch(path.name)
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def attempt_folders(self) -> list[AttemptPaths]:
        """Return the attempts so far, first one first."""
        if not self.attempts.is_dir():
            return []
        found = [AttemptPaths(path) for path in self.attempts.iterdir() if _ATTEMPT_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda attempt: attempt.number)
