"""The layout of all files: the only module with the names of a run folder's files."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError

#: Valid names of experiments: used for a folder, a Slurm job and a wandb group.
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
#: ASCII digits: ``int`` accepts others too, and rejects some that ``str.isdigit`` accepts.
_ATTEMPT_NAME = re.compile(r"[1-9][0-9]{0,8}")
#: Suffixes of the files of ``export`` that are programs: of ONNX and of torch.export.
PROGRAMS = (".onnx", ".pt2")
#: Folders of checkpoints and of evaluations.
_STEP_NAME = re.compile(r"step-([0-9]{8,15})")


def expanded(path: str) -> Path:
    """Return the path with its ``~`` expanded; unchanged if this machine has no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def from_here(path: Path) -> str:
    """Return the path as a user would type it: relative if it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def runs_root() -> Path:
    """Return the folder of all experiments: ``$HPC_TRAIN_RUNS``, else ``runs`` in the current folder."""
    given = Path(os.environ.get("HPC_TRAIN_RUNS") or "runs")
    try:
        return given.expanduser().absolute()
    except RuntimeError as error:
        home = given.parts[0]
        raise UsageError(
            f"HPC_TRAIN_RUNS: {str(given)!r} starts with {home!r}, and this machine "
            "knows no such home folder; write the folder's full path"
        ) from error


def cache_folder() -> Path:
    """Return the cache folder of commands: ``$HPC_TRAIN_CACHE``, else the user's cache folder."""
    if given := os.environ.get("HPC_TRAIN_CACHE"):
        return expanded(given)
    import platformdirs  # ``--help`` needs no file of it

    return platformdirs.user_cache_path("hpc-train")


class _Entry:
    """A file or folder below another path of its object; the path is computed once."""

    def __init__(self, name: str, parent: str = "folder") -> None:
        self.name, self.parent = name, parent

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, paths: Any, owner: type) -> Path:
        path: Path = getattr(paths, self.parent) / self.name
        vars(paths)[self._attribute] = path
        return path


@dataclass(frozen=True)
class CheckpointPaths:
    """The files of one checkpoint folder; it is valid only once ``manifest`` exists."""

    folder: Path

    #: Names, sizes and hashes of the files; written last.
    manifest = _Entry("manifest.json")
    #: Everything that is not a tensor, and the location of each tensor's shards.
    state = _Entry("state.json")

    def shard(self, rank: int) -> Path:
        """The tensors that a rank wrote."""
        return self.folder / f"shard-{rank:05d}.safetensors"

    def shard_index(self, rank: int) -> Path:
        """One rank's entry for its shard; merged into ``state`` by rank 0, then removed."""
        return self.folder / f"shard-{rank:05d}.json"

    @property
    def step(self) -> int:
        """The optimizer step, from the folder's name. Raises ValueError for another folder."""
        match = _STEP_NAME.fullmatch(self.folder.name)
        if match is None:
            raise ValueError(f"{self.folder} is not a checkpoint's folder")
        return int(match[1])


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt: from one start of all ranks to their end."""

    folder: Path

    @property
    def number(self) -> int:
        """Counts from 1."""
        return int(self.folder.name)

    #: ``attempt.json``: process and place of the attempt, and its termination reason.
    record = _Entry("attempt.json")
    #: Address and port of rank 0's program, for the others; written once the working folder is ready.
    program = _Entry("program.json")
    #: Rank 0's published address of the store that the others connect to.
    rendezvous = _Entry("rendezvous.json")
    #: Timestamps of rank 0's events; merged into ``record`` when that is read.
    events = _Entry("events.json")
    #: Lines from rank 0 for the command that follows the run: loaded pretrained weights, files that `predict
    #: --data` does not read.
    notices = _Entry("notices.json")
    #: Like ``rendezvous``, for the processes that try micro-batch sizes.
    trial_rendezvous = _Entry("trial-rendezvous.json")

    def log(self, rank: int) -> Path:
        """The output of a rank."""
        return self.folder / f"rank-{rank}.log"

    def exit(self, rank: int) -> Path:
        """A rank's exit code, if it is not 0; for requested stops only rank 0 writes it."""
        return self.folder / f"rank-{rank}.exit"

    def error(self, rank: int) -> Path:
        """Why a rank ended, if it caused the end itself."""
        return self.folder / f"rank-{rank}.error"

    def session(self, rank: int) -> Path:
        """The messages that a rank's program sends by ``hpc_train.session``, one JSON object per line."""
        return self.folder / f"rank-{rank}.session"

    def ended(self, rank: int) -> Path:
        """Exists once the rank's program has ended without an error; the others' supervisors wait for it."""
        return self.folder / f"rank-{rank}.ended"

    def files_of_ranks(self, ending: str) -> dict[int, Path]:
        """The ranks' files with this ending, such as ``.log``, by rank; in the order of their names."""
        found = sorted(self.folder.glob(f"rank-*{ending}"))
        named = ((path.name.removeprefix("rank-").removesuffix(ending), path) for path in found)
        return {int(rank): path for rank, path in named if rank.isdecimal()}

    def stacks(self, rank: int) -> Path:
        """The stacks of a rank's threads when its watchdog considered the attempt hung."""
        return self.folder / f"rank-{rank}.stacks"

    def flight_record(self, rank: int) -> Path:
        """NCCL's last collectives, from its flight recorder, at the same moment."""
        return self.folder / f"rank-{rank}.nccl.json"

    #: The trace of ``profile``, in Chrome's format.
    profile_trace = _Entry("profile.json.gz")
    #: The bottleneck of the profiled steps, and the operations that take longest.
    profile_table = _Entry("profile.txt")

    def heartbeat(self, node: str) -> Path:
        """The last known activity of the ranks of a node."""
        return self.folder / f"heartbeat-{node}.json"

    def staging(self, node: str) -> Path:
        """Whether a node has a copy of the data; written by its first rank, for the others."""
        return self.folder / f"staging-{node}.json"

    #: Nodes that the next attempt should exclude but needs to start; written by the batch script.
    kept_nodes = _Entry("kept-nodes")

    def bad_samples(self, rank: int) -> Path:
        """Samples that a rank could not read and skipped, one per line."""
        return self.folder / f"rank-{rank}.bad_samples.jsonl"


@dataclass(frozen=True)
class SubmissionPaths:
    """The files of one array job: its script, its pickles, the batch script's output."""

    folder: Path

    #: ``submission.json``: its runs, its job and its progress.
    record = _Entry("submission.json")
    #: The batch script of a job that evaluates a checkpoint.
    evaluation_script = _Entry("evaluation.sh")
    #: Locked by the process that submits such jobs.
    evaluation_lock = _Entry("evaluation.lock")

    @property
    def token(self) -> str:
        """The random name of the submission."""
        return self.folder.name


@dataclass(frozen=True)
class ExperimentPaths:
    """The files shared by the runs of one experiment. Hidden: not a run."""

    folder: Path

    #: One folder per submission to Slurm.
    submissions = _Entry(".slurm")
    #: Locked by the command that submits.
    submission_lock = _Entry("lock", "submissions")
    #: Locked while a run looks for its experiment in MLflow, or creates it.
    mlflow_lock = _Entry(".mlflow.lock")

    @property
    def snapshots(self) -> Path:
        """Snapshots of code by content, shared by this user's experiments.

        In a shared runs folder ``.code`` belongs to its first user; others have ``.code-<uid>``.
        """
        first = self.folder.parent / ".code"
        try:
            is_own = first.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            is_own = True
        return first if is_own else first.with_name(f".code-{os.geteuid()}")

    def submission(self, token: str) -> SubmissionPaths:
        """The files of one submission, which may not exist yet."""
        return SubmissionPaths(self.submissions / token)

    def submission_folders(self) -> list[SubmissionPaths]:
        """Return the submissions that have a record, in no order."""
        try:
            found = [SubmissionPaths(path) for path in self.submissions.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # the last: another user's
            return []
        return [submission for submission in found if submission.record.is_file()]


@dataclass(frozen=True)
class RunPaths:
    """The files of one run."""

    folder: Path

    #: The experiment for people, without defaults.
    experiment = _Entry("experiment.yaml")
    #: The experiment with every default; read by attempts.
    resolved = _Entry("resolved.json")
    #: Facts that were recorded at the run's creation, and changes of later attempts.
    run = _Entry("run.json")
    #: The state and progress of the run.
    status = _Entry("status.json")
    #: One JSON object per row of metrics.
    metrics = _Entry("metrics.jsonl")
    #: A record per step, by which runs and replays are compared.
    digests = _Entry("digests.bin")
    #: Records of the state by module every few steps (``checkpoint.digests: parts``).
    part_digests = _Entry("parts.bin")
    #: One JSON object per step whose loss or gradient norm was a spike.
    spikes = _Entry("spikes.jsonl")
    #: One JSON object per step that was rolled back.
    rollbacks = _Entry("rollbacks.jsonl")
    #: The steps of another run to repeat, in a folder whose ranks replay and do not train.
    replayed_steps = _Entry("replay.json")
    #: Which checkpoint of another run to evaluate, in a folder whose ranks evaluate and do not train.
    evaluated_checkpoint = _Entry("evaluation.json")

    def predictions(self, rank: int) -> Path:
        """A rank's predictions for ``predict``, in a folder whose ranks do not train."""
        return self.folder / f"predictions-{rank}.jsonl"

    def prediction_files(self) -> list[Path]:
        """Return the files of all ranks, in no order."""
        return list(self.folder.glob("predictions-*.jsonl"))

    def replay(self, rank: int) -> Path:
        """A rank's results for ``replay``, one JSON object per step."""
        return self.folder / f"replay-{rank}.jsonl"

    def replayed_batch(self, rank: int) -> Path:
        """A rank's micro-batches for ``replay --save-batch``."""
        return self.folder / f"batch-{rank}.safetensors"

    #: The samples for ``replay --save-samples``.
    replayed_samples = _Entry("samples")
    #: The folder in which a program works.
    work = _Entry("work")
    #: Link to the snapshot of the code.
    code = _Entry("code")
    #: The result of ``micro_batch_size: auto``, from the run's first attempt on.
    micro_batch = _Entry("micro_batch.json")
    #: The run was cancelled: it is not requeued, whatever its ranks report. Removed by a resume.
    cancelled = _Entry("cancelled.json")

    @property
    def siblings(self) -> ExperimentPaths:
        """The folder of all runs of the experiment."""
        return ExperimentPaths(self.folder.parent)

    #: wandb's files.
    wandb = _Entry("wandb")
    #: The rows that wandb may have received.
    wandb_sent = _Entry("sent.json", "wandb")
    #: The rows in wandb's offline files, which may be uploaded.
    wandb_offline = _Entry("offline.json", "wandb")
    #: Locked by the process that talks to wandb for the run.
    wandb_lock = _Entry(".lock", "wandb")
    #: Locked by the process that writes wandb's offline files.
    wandb_offline_lock = _Entry(".offline.lock", "wandb")
    #: wandb's files while ``sync`` sends; removed afterwards.
    wandb_sync = _Entry("sync", "wandb")
    #: Records of the rows sent to MLflow: one folder per store.
    mlflow = _Entry("mlflow")
    #: Locked by the process that talks to MLflow for the run.
    mlflow_lock = _Entry(".lock", "mlflow")
    #: TensorBoard's event files.
    tensorboard = _Entry("tensorboard")
    #: The step up to which the event files have all rows.
    tensorboard_flushed = _Entry("flushed.json", "tensorboard")
    #: Locked by the process that writes event files.
    tensorboard_lock = _Entry(".lock", "tensorboard")
    #: Records of the rows that ``sync`` has sent, by destination.
    synced = _Entry("sync.json")
    #: Final rows as tables.
    csv = _Entry("csv")
    #: Compile caches.
    cache = _Entry("cache")
    #: One folder per attempt.
    attempts = _Entry("attempts")
    #: Locked while an attempt is claimed, and while ``clean`` removes files.
    claim_lock = _Entry(".claim.lock")
    #: One folder per checkpoint.
    checkpoints = _Entry("checkpoints")
    #: Files of evaluations besides their rows: tables, pictures.
    evaluations = _Entry("evaluations")
    #: Requests, jobs and rows of evaluations that jobs of their own carry out.
    evaluation_jobs = _Entry("evaluation_jobs")
    #: The request of ``verify --replay --submit``, its batch script, and what its jobs have recorded.
    verification = _Entry("verification")

    def evaluation_job(self, step: int, ending: str) -> Path:
        """A file of the job that evaluates the checkpoint of ``step``: due, jobs, json (its row), failed."""
        return self.evaluation_jobs / f"step-{step:08d}.{ending}"

    @classmethod
    def entry_names(cls) -> set[str]:
        """Return all names that hpc-train uses in a run's folder."""
        entries = [entry for entry in vars(cls).values() if isinstance(entry, _Entry)]
        return {entry.name for entry in entries if entry.parent == "folder"}

    def attempt(self, number: int) -> AttemptPaths:
        """The files of one attempt, which may not exist yet."""
        return AttemptPaths(self.attempts / str(number))

    def checkpoint(self, step: int) -> CheckpointPaths:
        """The files of the checkpoint of ``step``, which may not exist."""
        return CheckpointPaths(self.checkpoints / f"step-{step:08d}")

    def evaluation(self, step: int) -> Path:
        """The folder of the evaluation at ``step``; it exists only if the evaluation wrote files."""
        return self.evaluations / f"step-{step:08d}"

    def evaluation_folders(self) -> dict[int, Path]:
        """Return step → folder of the evaluations that wrote files, lowest step first."""
        if not self.evaluations.is_dir():
            return {}
        found = [(_STEP_NAME.fullmatch(path.name), path) for path in self.evaluations.iterdir()]
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def evaluation_images(self, step: int) -> dict[str, Path]:
        """Return name → file of the evaluation's images at ``step``: its PNG files."""
        files = [path for path in self.evaluation(step).glob("*.png") if not path.is_symlink()]
        return {path.stem: path for path in sorted(files) if path.is_file()}

    def checkpoint_folders(self) -> list[CheckpointPaths]:
        """Return the folders named like a checkpoint, committed or not, lowest step first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            CheckpointPaths(path) for path in self.checkpoints.iterdir() if _STEP_NAME.fullmatch(path.name)
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def attempt_folders(self) -> list[AttemptPaths]:
        """Return the attempts so far, in order."""
        try:
            names = os.listdir(self.attempts)  # noqa: PTH208  (of each run that is listed)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return []
            raise
        return [self.attempt(number) for number in sorted(map(int, filter(_ATTEMPT_NAME.fullmatch, names)))]
