"""Every key of the experiment file, with its type, bounds, unit and "off" value (a contract).

Here and in the modules of the sections are only the types and bounds of single values; ``rules`` has the
constraints between keys. Each field's docstring is its help text in the JSON Schema and the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.container_section import ContainerConfig
from hpc_train.experiment.config.fields import (
    GPU_TYPE_PATTERN,
    MAIL_PATTERN,
    MODULE_PATTERN,
    Arguments,
    DurationMin,
    EvaluationMetric,
    Hours,
    Minutes,
    Name,
    NodeRange,
    NotNegativeFloat,
    NotNegativeInt,
    PlainName,
    PositiveInt,
    ScriptPath,
    Section,
    SignalLead,
    TaskName,
    pattern,
    slurm_word,
)
from hpc_train.experiment.config.program_section import ProgramConfig, as_section
from hpc_train.experiment.config.sweep_sections import SweepConfig
from hpc_train.experiment.config.training_sections import (
    CompileConfig,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    ProfileConfig,
)

#: What plug-ins receive, from one place.
__all__ = ["DataConfig", "Experiment", "Job", "ModelConfig", "Program"]


class CheckpointConfig(Section):
    """When checkpoints are saved. The last step is always saved."""

    every: Literal["auto"] | None = None
    """``auto``: the interval follows from the time that a save stops the training and from the run's own
    interruptions, 1 to 60 minutes. The training result does not depend on it. Default: as ``every_min`` or
    ``every_steps`` states."""
    every_min: Minutes | None = None
    """Minutes between checkpoints. Default: 10, or off if ``every`` or ``every_steps`` is given."""
    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. Default: by time only."""
    keep: PositiveInt = 3
    """Number of checkpoints to keep. The newest two are always kept."""
    keep_every: PositiveInt | None = None
    """Steps between checkpoints that are kept besides these, until ``hpc-train clean``; they are also saved,
    whatever the interval is. ``hpc-train bisect`` and ``replay`` begin at them. Default: none."""
    best: BestConfig | None = None
    """Also keep the checkpoint of the best evaluation, whatever ``keep`` is; it is saved when it is
    evaluated. Default: off."""
    digests: Literal["off", "steps", "parts"] | None = None
    """``steps``: record the samples, the loss and the gradients' norm of each step in ``digests.bin``, 40
    bytes per step, with which ``hpc-train replay`` compares. ``parts``: also record digests of weights and
    optimizer state by module in ``parts.bin``, every ``parts_every`` steps. Default: ``steps`` if
    ``deterministic``, else ``off``."""
    parts_every: PositiveInt | None = None
    """Steps between them (at most 4,096 times). Default: 32, doubled until they take 0.5 % of the time."""


class BestConfig(Section):
    """Which evaluation is the best."""

    metric: Annotated[EvaluationMetric, Field(examples=["accuracy"])]
    """A metric of the ``val`` rows, such as ``accuracy`` (or ``val/accuracy``) or ``loss``; ``ema_accuracy``
    is that of the EMA weights."""
    mode: Annotated[Literal["min", "max"], Field(examples=["max"])]
    """``max``: a higher value is better; ``min``: a lower one."""


class EarlyStoppingConfig(Section):
    """When a run ends before its last step. The learning rate schedule does not depend on it."""

    metric: Annotated[EvaluationMetric, Field(examples=["loss"])]
    """A metric of the ``val`` rows, such as ``accuracy`` or ``loss`` (or ``val/loss``); ``ema_loss`` is that
    of the EMA weights."""
    mode: Annotated[Literal["min", "max"], Field(examples=["min"])]
    """``max``: a higher value is better; ``min``: a lower one."""
    patience: Annotated[PositiveInt | None, Field(examples=[5])] = None
    """Consecutive evaluations without improvement after which the run ends. Default: unlimited, which needs
    ``median_after``."""
    median_after: PositiveInt | None = None
    """Evaluations after which the run also ends if its best value is worse than the median of the best values
    that at least three other runs of the same name had by this step. Default: other runs do not matter."""
    min_delta: NotNegativeFloat = 0.0
    """An evaluation is an improvement if it is better than the best by more than this."""


class RecoveryConfig(Section):
    """How often, and after which failures, a run resumes automatically. Does not change the training
    result.
    """

    max_preemptions: NotNegativeInt | None = None
    """Number of preemptions and time limits after which a job is requeued. Default: unlimited."""
    max_crashes: NotNegativeInt = 3
    """Number of crashes, hangs and bad nodes after which a job is requeued."""
    max_without_progress: NotNegativeInt = 2
    """Number of consecutive attempts that trained without saving a new checkpoint after which a job is
    requeued."""
    restart: Literal["auto", "in_place", "requeue"] = "auto"
    """How the attempt after a crash, a hang or a bad node begins. ``in_place``: in the same allocation,
    without a wait in the queue, if its nodes respond and enough time is left. ``requeue``: after a requeue.
    ``auto``: in place, but by a requeue after two failures in a row without a new checkpoint."""
    standby: bool = False
    """Once an attempt trains, start the ranks of the next one beside it: they import torch and wait, so that
    a restart in place needs no imports. Needs Slurm, and host memory for each rank."""
    hang_after_min: Minutes = 5.0
    """Minutes without progress of any rank after which the stacks of all ranks are saved and the attempt
    ends. Before the first step it is six times as long. While ranks connect it is 3 minutes, or three fifths
    of it if that is longer."""
    check_nodes: bool = True
    """Check device, memory, arithmetic, network and disk of every rank before the first step. ``false``: skip
    the check."""
    verify_every_steps: PositiveInt | None = None
    """Steps after which a step's gradients are computed twice, the second time on another rank, and compared
    bitwise. A node that computes otherwise is excluded, and the run continues from the newest checkpoint
    before the last comparison. For ``ddp`` and ``zero1``, if the run is deterministic. Default: off."""
    exclude_nodes_for_h: Hours = 24.0
    """Hours for which a node that failed its check, or ended two attempts, is excluded. 0: never exclude
    nodes."""


class EvaluationConfig(Section):
    """When the validation data are evaluated. They are always evaluated at the end."""

    every_epochs: PositiveInt | None = None
    """Epochs between evaluations. Default: 1, or off if ``every_steps`` is given."""
    every_steps: PositiveInt | None = None
    """Optimizer steps between evaluations. Default: by epochs."""
    sample_tokens: NotNegativeInt = 64
    """``causal_lm``: tokens of the text that the model writes at each evaluation, kept in the run folder.
    Each costs a forward pass of one sequence. 0: no text."""
    images: Annotated[int, Field(ge=0, le=64)] = 8
    """``classification``, ``segmentation``, ``detection``: validation images that each evaluation keeps in
    the run folder with the predictions drawn on them, evenly spaced over the validation data. 0: none."""
    as_job: bool = False
    """Save a checkpoint at the step of each evaluation and evaluate it in a Slurm job of its own, with one
    rank, while training continues. Such an evaluation keeps no text and no images. Needs a job of its own:
    with ``--local`` and ``--here`` the run's ranks evaluate."""
    job_time_limit: DurationMin | None = None
    """``as_job``: time limit of such a job. Default: 1 hour, or ``slurm.time_limit`` if that is shorter."""


class SlurmConfig(Section):
    """The resources to request from Slurm. They do not change the training result."""

    profile: Annotated[
        str,
        pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "1 to 64 lower-case letters, digits, '_' or '-', like generic"),
    ] = "generic"
    """Name of the site profile to use, a file with the settings of this cluster. Default: ``generic``."""
    partition: Annotated[str, slurm_word("gpu-long")] | None = None
    """Partition to submit to. Default: the site's default partition."""
    nodes: PositiveInt | NodeRange = 1
    """Number of nodes, or a range such as ``2-8``: each attempt then uses as many nodes as Slurm allocates.
    """
    spare_nodes: NotNegativeInt = 0
    """Nodes to request in addition to ``nodes``. Ranks use them once another node of the job fails its
    check, dies or is excluded: the next attempt begins in the same allocation. 0: none."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs to request per node. 0: no GPUs."""
    gpu_type: Annotated[str, pattern(GPU_TYPE_PATTERN, "one word like a100 or nvidia_h100")] | None = None
    """GPU type as the site names it. Default: any type."""
    ranks_per_node: PositiveInt | None = None
    """Number of ranks (processes) per node. Default: one per GPU, or one per node without GPUs."""
    cpus_per_gpu: PositiveInt | None = None
    """CPU cores to request per GPU (per rank without GPUs), divided evenly among the ranks. Default: the
    site's default."""
    mem_gb: PositiveInt | None = None
    """Memory to request per node, in GB. Default: the site's default."""
    time_limit: DurationMin | None = None
    """Time limit of the job, such as ``90min``, ``24h`` or ``2-12:00:00``. Default: the partition's limit."""
    runs_per_job: PositiveInt = 1
    """Number of runs of a sweep that train in one job at the same time, each in a slot of its own. The other
    keys are the request of one run: the job requests as many times the ranks, cores, memory and GPUs, on one
    node. 1: a job for each run."""
    runs_per_gpu: PositiveInt = 1
    """Number of runs of a job with ``runs_per_job`` that share each GPU, by NVIDIA's MPS if the node has it.
    Each run may use its part of the GPU's memory, and its ``cpus_per_gpu`` are its own. Needs
    ``gpus_per_node: 1``, and ``runs_per_job`` as a multiple of it. 1: each run has its own GPUs."""
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """Budget of GPU-hours for all runs of the file, divided evenly among them. ``plan`` and ``submit`` refuse
    a file that is predicted to need more, or a run of it more than its share; where nothing predicts it, one
    whose runs may use more in one attempt each. A run that has used its share is not requeued. Default: no
    budget."""
    signal_lead_s: SignalLead | None = None
    """Seconds before the time limit at which Slurm signals the ranks to save and stop. Default: 120; once a
    save has been measured, three times the longest save plus one minute. Never more than half the time limit.
    """
    account: Annotated[str, slurm_word("vision-lab")] | None = None
    """Account to charge. Default: the user's default account."""
    qos: Annotated[str, slurm_word("high")] | None = None
    """Quality of service. Default: the site's default."""
    constraint: Annotated[str, slurm_word("a100|h100")] | None = None
    """Node features that are required (``--constraint``). Default: none."""
    exclude: Annotated[str, slurm_word("n3,n[7-9]")] | None = None
    """Nodes to exclude from the allocation. Default: none."""
    reservation: Annotated[str, slurm_word("course-1")] | None = None
    """Reservation to use. Default: none."""
    dependency: Annotated[str, slurm_word("afterok:41")] | None = None
    """Job dependency, in sbatch's syntax. Default: none."""
    mail: Annotated[str, pattern(MAIL_PATTERN, "an address like ada@example.org")] | None = None
    """Address that Slurm notifies when the job ends or fails. Default: no mail."""
    extra: dict[PlainName, str | int | bool] = {}
    """Further sbatch options by their long names. Options that hpc-train sets itself are rejected."""


class EnvironmentConfig(Section):
    """The software environment on the nodes, set up before Python starts."""

    python: ScriptPath | None = None
    """Python interpreter on the nodes. Default: the one that runs ``submit``; in a container, its
    ``python3``."""
    modules: list[Annotated[str, pattern(MODULE_PATTERN, "a module's name like cuda/12.8")]] = []
    """Modules to load with ``module load``, in this order. Default: none."""
    container: Annotated[
        ContainerConfig | None, BeforeValidator(lambda v: {"image": v} if isinstance(v, str) else v)
    ] = None
    """Container for the ranks: an Apptainer image, or a section of settings. Default: no container."""
    strict: bool = False
    """Refuse to resume with other versions of Python, torch or this package than the checkpoint was saved
    with. ``false``: warn only."""


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    project: Annotated[
        str,
        pattern(
            r"[^/\\#?%:\x00-\x1f\x7f]{1,128}",
            "1 to 128 characters without '/', '#', '?', '%' or ':', like cifar10",
        ),
        Field(examples=["my-project"]),
    ]
    """Name of the wandb project."""
    entity: (
        Annotated[str, pattern(r"[A-Za-z0-9_.-]{1,128}", "letters, digits, '_', '.' or '-', like my-team")]
        | None
    ) = None
    """User or team that owns the project. Default: the account's default entity."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """``online``, ``offline``, or ``auto``: online if an API key is set, otherwise offline."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    """Tags of the wandb run. Default: none."""


class MlflowConfig(Section):
    """Logging to MLflow. Needs ``pip install 'hpc-train[mlflow]'``."""

    tracking_uri: Annotated[str, Field(max_length=2000, examples=["https://mlflow.example.org"])] | None = (
        None
    )
    """URI of a server (``https://…``), of a folder (``file:///…``) or of a database (``sqlite:////…``).
    Without user and password, which MLflow reads from its own environment variables. Default: the value of
    ``MLFLOW_TRACKING_URI`` when the ranks start."""
    experiment: (
        Annotated[
            str,
            pattern(
                r"[^\x00-\x1f\x7f\x22\x27]{1,256}",
                "1 to 256 characters without quotes and control characters, like cifar10",
            ),
        ]
        | None
    ) = None
    """Name of the MLflow experiment, which is created if there is none. Default: ``name`` of this file."""


class LoggingConfig(Section):
    """What is logged. ``metrics.jsonl`` is always written."""

    every_steps: PositiveInt = 10
    """Optimizer steps between training rows."""
    wandb: WandbConfig | None = None
    """Logging to Weights & Biases. Default: off."""
    mlflow: MlflowConfig | None = None
    """Logging to MLflow. Default: off."""
    tensorboard: bool = False
    """Write event files for TensorBoard to the run folder. Needs ``pip install 'hpc-train[tensorboard]'``."""
    csv: bool = False
    """Write ``csv/train.csv`` and ``csv/val.csv`` to the run folder, up to the newest checkpoint."""
    loggers: dict[PlainName, Arguments] = {}
    """Loggers without a section of their own, such as plug-ins, by name, each with its keyword arguments.
    Default: none."""

    def arguments_by_logger(self) -> dict[str, dict[str, Any]]:
        """Return the loggers of the file; ``logging.<name>: true``, or a section, turns on that logger."""
        keys = {key: getattr(self, key) for key in type(self).model_fields}
        sections = {key: value.model_dump() for key, value in keys.items() if isinstance(value, Section)}
        switches: dict[str, dict[str, Any]] = {key: {} for key, value in keys.items() if value is True}
        return self.loggers | sections | switches


class Job(Section):
    """The keys of a file that do not depend on what its runs execute, our trainer or a program.

    The first three begin a file, the others end it.
    """

    #: Name of the implementation of ``experiment.workload.Workload``.
    workload: ClassVar[str]

    name: Annotated[Name, Field(examples=["my-experiment"])]
    """Name of the experiment: of its folder, its Slurm jobs and its wandb group."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """``cuda``, ``cpu``, or ``auto``: CUDA if available. On Slurm, ``auto`` fails if GPUs were requested and
    none is available."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run once a metric of the evaluations stops improving. Default: off."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    slurm: SlurmConfig | None = None
    environment: EnvironmentConfig = EnvironmentConfig()
    sweep: SweepConfig = SweepConfig()
    stages: list[str | dict[str, Any]] = []
    """Runs that start one after the other, each once the former has completed: files, relative to this one,
    or sections of keys that differ from the rest of this file. ``export: PATH`` writes the weights of the
    training stage before it, ``evaluate: true`` evaluates its best checkpoint. Default: one stage, the file.
    """
    logging: LoggingConfig = LoggingConfig()


class Experiment(Job):
    """One experiment file."""

    workload: ClassVar[str] = "training"

    deterministic: bool | None = None
    """Make the results bitwise reproducible on the same devices. Default: true on CPU, false on CUDA."""
    task: Annotated[TaskName, Field(examples=["classification"])]
    """Training task: a name of the table of tasks, a plug-in's, or ``package.module:Class`` of your own."""
    model: Annotated[ModelConfig, Field(examples=[{"name": "timm/resnet18"}])]
    data: Annotated[DataConfig, Field(examples=[{"name": "digits"}])]
    optimization: Annotated[
        OptimizationConfig,
        Field(
            examples=[
                {
                    "epochs": 30,
                    "global_batch_size": 256,
                    "micro_batch_size": 64,
                    "optimizer": {"name": "adamw", "lr": 0.001},
                }
            ]
        ),
    ]
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"] = "fp32"
    """Precision of the forward and backward pass. ``bf16``, ``fp16``: mixed precision; ``fp8``: bf16 with the
    blocks' linear layers in float8."""
    compile: Annotated[
        CompileConfig, BeforeValidator(lambda v: {"enabled": v} if isinstance(v, bool) else v)
    ] = CompileConfig(enabled=False)
    """Compile the model with torch.compile: ``false``, ``true`` (default settings) or a section of settings.
    """
    activation_checkpointing: Annotated[
        str,
        pattern(
            "off|blocks|selective|every [1-9][0-9]{0,3}", "off, blocks, selective or every n, like every 2"
        ),
    ] = "off"
    """Recompute activations in the backward pass to save memory: of all ``blocks``, of ``every n``-th block,
    or ``selective``: all but matrix products and attention. ``off``: keep all activations."""
    evaluation: EvaluationConfig = EvaluationConfig()
    profile: Annotated[
        ProfileConfig | None, BeforeValidator(lambda v: ({} if v else None) if isinstance(v, bool) else v)
    ] = None
    """Profile some steps: ``true`` (default settings) or a section of settings. Default: off."""

    @property
    def micro_batches(self) -> int:
        """M: micro-batches per step. Undefined for ``micro_batch_size: auto``."""
        size = self.optimization.micro_batch_size
        assert isinstance(size, int), "micro_batch_size: auto must be resolved first"
        return self.optimization.global_batch_size // size

    @property
    def workers(self) -> int:
        """Return the loader processes per rank. Undefined for ``data.workers: auto``."""
        assert isinstance(self.data.workers, int), "data.workers: auto must be resolved first"
        return self.data.workers

    def with_workers(self, workers: int) -> Experiment:
        """Return a copy with the number that ``auto`` was resolved to."""
        return self.model_copy(update={"data": self.data.model_copy(update={"workers": workers})})

    def with_micro_batch_size(self, size: int) -> Experiment:
        """Return a copy with the number that ``auto`` was resolved to."""
        optimization = self.optimization.model_copy(update={"micro_batch_size": size})
        return self.model_copy(update={"optimization": optimization})


class Program(Job):
    """A file whose runs execute a program of the user's."""

    workload: ClassVar[str] = "program"

    program: Annotated[
        ProgramConfig, BeforeValidator(as_section), Field(examples=[{"command": ["python", "train.py"]}])
    ]


def keys_of(kind: type[Job]) -> list[str]:
    """Return the keys of a file in the order in which they are shown."""
    shared = [*Job.model_fields]
    return [*shared[:3], *(key for key in kind.model_fields if key not in shared), *shared[3:]]


def kind_of(data: Mapping[str, Any]) -> type[Job]:
    """Return the kind of file with this content."""
    return Program if "program" in data else Experiment


def as_training(job: Job) -> Experiment:
    """Return the job as an experiment of our trainer. Raises BadFileError if its runs execute a program."""
    if not isinstance(job, Experiment):
        raise BadFileError(
            f"{job.name}: its runs execute a program of yours, and only hpc-train's own trainer can do that; "
            f"use the program itself with a checkpoint (`hpc-train verify {job.name}` lists them)"
        )
    return job


CheckpointConfig.model_rebuild()
Experiment.model_rebuild()
Program.model_rebuild()
