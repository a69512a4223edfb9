"""Every key of the experiment file, its type, bounds, unit and "off" value (DESIGN §4, a contract).

Only shapes and bounds of single values stand here; what two keys may not say together is in ``rules``.
Each field's docstring is its help text in the JSON Schema and the reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from hpc_train.config.durations import FORMS, format_duration, parse_duration_min
from hpc_train.paths import NAME_PATTERN

#: ``provider/name``, a bare provider, or ``package.module:factory``.
PART_NAME_PATTERN = (
    r"[A-Za-z0-9_][A-Za-z0-9_./+-]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
)
# What follows stands in a batch script. None begins with a sign that could make an option of it.
#: A word that may stand in a ``#SBATCH`` line: no blank, quote, dollar, backquote, control character.
SLURM_WORD_PATTERN = r"[A-Za-z0-9_.,:@+*&|()\[\]=/~%^?][A-Za-z0-9_.,:@+*&|()\[\]=/~%^?-]{0,255}"
GPU_TYPE_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
MAIL_PATTERN = r"[A-Za-z0-9._%+][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9.-]{1,190}"
MODULE_PATTERN = r"[A-Za-z0-9_.][A-Za-z0-9_.+/-]{0,127}"
SCRIPT_PATH_PATTERN = r"""[^-\s'"\\$`;&|<>\x00-\x1f\x7f][^\s'"\\$`;&|<>\x00-\x1f\x7f]{0,1023}"""


def _pattern(pattern: str, rule: str) -> Any:
    """``rule`` is the pattern in words with an example; editors and our own errors show it."""
    # Anchored at the very end: "$" would let a newline through.
    return Field(pattern=rf"\A(?:{pattern})\z", json_schema_extra={"patternErrorMessage": rule})


def _duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration_min(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"a bare number has no unit; write {value}min or {value}h")
    raise ValueError(f"needs a duration; write {FORMS}")


def _pair(value: object) -> object:
    # YAML has lists only, and strict validation takes no list for a tuple.
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[
    str,
    _pattern(
        NAME_PATTERN,
        "1 to 64 lower-case letters, digits, '.', '_' or '-', not first a sign, like cifar10-resnet50",
    ),
]
PartName = Annotated[
    str, _pattern(PART_NAME_PATTERN, "provider/name like timm/resnet50, or package.module:factory")
]
SlurmWord = Annotated[
    str, _pattern(SLURM_WORD_PATTERN, "one word without blanks, quotes, '$' or ';', like gpu-long")
]
#: Slurm keeps it in 16 bits.
SignalLead = Annotated[int, Field(ge=1, le=65535)]
DurationMin = Annotated[
    int,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["90min", "24h", "2-12:00:00"]}, mode="validation"),
]
Probability = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeInt = Annotated[int, Field(ge=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], BeforeValidator(_pair)]
PlainName = Annotated[
    str,
    _pattern(
        r"[a-z][a-z0-9_-]{0,63}",
        "1 to 64 lower-case letters, digits, '_' or '-', the first a letter, like my_part",
    ),
]
OptimizerName = Annotated[
    str,
    _pattern(
        r"[A-Za-z][A-Za-z0-9_/]{0,63}",
        "1 to 64 letters, digits, '_' or '/', the first a letter, like adamw or timm/lamb",
    ),
]
ScheduleName = Annotated[
    str,
    _pattern(
        r"[A-Za-z][A-Za-z0-9_/]{0,63}",
        "1 to 64 letters, digits, '_' or '/', the first a letter, like cosine or torch/OneCycleLR",
    ),
]
ScriptPath = Annotated[
    str, _pattern(SCRIPT_PATH_PATTERN, "a path without blanks, quotes, '$' or ';', like /opt/venv/bin/python")
]
NodeRange = Annotated[str, _pattern(r"[1-9][0-9]{0,5}-[1-9][0-9]{0,5}", "a range like 2-8")]
Arguments = dict[str, Any]


class Section(BaseModel):
    """A mapping of the file: no unknown keys, no conversions, no inf or nan, never changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """What is trained."""

    name: PartName
    """``timm/<name>``, ``torchvision/<name>``, another ``provider/<name>`` or ``package.module:factory``."""
    pretrained: bool | str = False
    """``true`` (the hub's weights), or a path to .safetensors or .pth; ``false``: random weights."""
    args: Arguments = {}
    """Keyword arguments of the factory. ``num_classes`` is given by the data set unless it stands here."""
    channels_last: bool = False
    """Keep images and weights in NHWC memory order (faster convolutions); ``false``: NCHW."""


class AugmentConfig(Section):
    """Random changes of a training image, each from the sample's own counter-based random numbers."""

    hflip: Probability = 0.0
    """Probability of a left-right flip; 0: off."""
    vflip: Probability = 0.0
    """Probability of an upside-down flip; 0: off."""
    crop_padding: Annotated[int, Field(ge=0, le=1024)] = 0
    """Pad by so many pixels of zeros and crop back at random; 0: off."""
    random_resized_crop: RandomResizedCropConfig | None = None
    """Crop a random part and resize it to ``data.image_size``; absent: off."""
    randaugment: RandAugmentConfig | None = None
    """Apply random operations of RandAugment (arXiv:1909.13719); absent: off."""
    erasing: Probability = 0.0
    """Probability of erasing a random rectangle (arXiv:1708.04896); 0: off."""


class RandomResizedCropConfig(Section):
    """Bounds of the random crop, as torchvision's RandomResizedCrop has them."""

    scale: Bounds = (0.08, 1.0)
    """Least and greatest part of the image's area."""
    ratio: Bounds = (0.75, 1.3333333333333333)
    """Least and greatest width / height."""


class RandAugmentConfig(Section):
    """RandAugment's two numbers."""

    num_ops: Annotated[int, Field(ge=1, le=8)] = 2
    """Operations an image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength, of 0 to 30."""


class NormalizeConfig(Section):
    """Mean and standard deviation a channel, of values in 0…1."""

    mean: list[float]
    """Mean of each channel."""
    std: list[PositiveFloat]
    """Standard deviation of each channel."""


class DataConfig(Section):
    """What it is trained on."""

    name: PartName
    """``torchvision/<class>``, ``imagefolder``, ``digits``, ``synthetic``, a plug-in's,
    or ``package.module:factory``."""
    root: str | None = None
    """Folder of the data; absent: for data that needs none."""
    args: Arguments = {}
    """Keyword arguments of the data set."""
    image_size: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Side of the square that images are brought to, in pixels; absent: as they are (all must be equal)."""
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the shorter side that evaluation's centre crop keeps with ``image_size`` (ImageNet: 0.875)."""
    augment: AugmentConfig = AugmentConfig()
    """Random changes of training images; absent: none."""
    normalize: NormalizeConfig | None = None
    """Mean and standard deviation a channel; absent: the data set's own."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Loader processes a rank; 0: load in the rank itself."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """A sample that can't be read: ``fail`` ends the run, ``skip`` names it and takes another instead."""
    max_bad_samples: PositiveInt = 10
    """With ``on_bad_sample: skip``: different samples of the whole run that may be bad; one more ends it."""


class OptimizerConfig(Section):
    """The optimizer: a name of torch.optim in lower case (``sgd``, ``adamw``), or else of timm (``lamb``)."""

    name: OptimizerName
    """torch.optim's class in any case, or timm's name; ``torch/…`` and ``timm/…`` say which."""
    lr: PositiveFloat
    """Learning rate at its peak, for G samples a step or, with ``lr_per_batch``, for that many."""
    lr_per_batch: PositiveInt | None = None
    """The batch that ``lr`` is meant for: the rate used is lr * G / lr_per_batch; absent: ``lr`` as it is."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of optimizers that have one; absent: their default."""
    weight_decay: NotNegativeFloat | None = None
    """Weight decay; absent: the optimizer's default."""
    decay_norm_and_bias: bool = True
    """``false``: no weight decay for tensors of fewer than two dims (norms, biases)."""
    args: Arguments = {}
    """More keyword arguments (betas, eps, nesterov, …)."""


class ScheduleConfig(Section):
    """How the learning rate goes over the steps, as a factor of its peak."""

    name: ScheduleName = "constant"
    """constant, cosine, linear, poly, step, multistep, exponential, ``timm/<name>`` or ``torch/<class>``."""
    warmup_epochs: NotNegativeFloat | None = None
    """Epochs of linear warm-up (parts of one allowed); absent: see ``warmup_steps``."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up; absent: ``warmup_epochs``, else none."""
    min_factor: Probability = 0.0
    """What the factor ends at (cosine, linear, poly) or never falls below (the others)."""
    args: Arguments = {}
    """Of the schedule: power (poly); every_epochs or every_steps, gamma (step, exponential);
    milestones_epochs or milestones_steps, gamma (multistep); or the class's own."""


class EmaConfig(Section):
    """An exponential moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)]
    """Part of the average that stays at each step."""


class OptimizationConfig(Section):
    """The mathematics of a step, the same on any hardware."""

    epochs: PositiveInt | None = None
    """Passes over the data, of ⌊N/G⌋ steps each; exactly one of ``epochs`` and ``steps``."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    global_batch_size: PositiveInt
    """G: samples that one optimizer step sees, over all ranks."""
    micro_batch_size: PositiveInt | Literal["auto"]
    """Samples of one forward pass of one rank; divides G; or ``auto``."""
    optimizer: OptimizerConfig
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the steps; absent: constant."""
    clip_grad_norm: PositiveFloat | None = None
    """Greatest global L2 norm of the gradient; absent: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the target that is spread over all classes; 0: off."""
    on_non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is NaN or infinite on any rank: ``stop`` ends the run; ``skip`` leaves the
    weights as they are; ``rollback`` goes back to the newest checkpoint and leaves that step's data out."""
    max_non_finite: PositiveInt = 10
    """With ``skip`` or ``rollback``: how often in the whole run; once more ends it."""
    ema: EmaConfig | None = None
    """Average of the weights; absent: off."""
    mixup: NotNegativeFloat = 0.0
    """Alpha of mixup (arXiv:1710.09412); 0: off."""
    cutmix: NotNegativeFloat = 0.0
    """Alpha of CutMix (arXiv:1905.04899); 0: off."""


class ParallelConfig(Section):
    """How ranks share the work. None of it changes the mathematics."""

    strategy: PlainName = "ddp"
    """ddp, fsdp, hsdp, zero1, zero2, tensor, pipeline, split, or a plug-in's."""
    shard: PositiveInt | None = None
    """Ranks that share one copy of the parameters; absent: by strategy."""
    replicate: PositiveInt | None = None
    """Copies of a sharded model (hsdp); absent: by strategy."""
    tensor: PositiveInt | None = None
    """Ranks that share each layer; absent: 1, or by strategy."""
    pipeline: PositiveInt | None = None
    """Stages; absent: 1, or by strategy."""
    sync_batchnorm: bool = False
    """Normalise over all ranks' micro-batches; ``false``: over one micro-batch."""
    args: Arguments = {}
    """Keyword arguments of the strategy: ``find_unused_parameters`` of ddp, or a plug-in's own."""


class CompileConfig(Section):
    """torch.compile."""

    enabled: bool = True
    """``compile: false`` is short for ``{enabled: false}``, ``compile: true`` for all defaults."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode."""
    scope: Literal["blocks", "model"] = "blocks"
    """Compile each repeated block (compiles once, fast), or the whole model."""
    dynamic: bool | None = None
    """Symbolic shapes; absent: torch decides."""
    fullgraph: bool = False
    """Fail at a graph break instead of going on in Python."""


class CheckpointConfig(Section):
    """When the run is saved. The last step always is."""

    every_min: PositiveFloat | None = None
    """Minutes between checkpoints; absent: 10 unless ``every_steps`` is given."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; absent: by time."""
    keep: PositiveInt = 3
    """Checkpoints that stay; the newest two always do."""


class RecoveryConfig(Section):
    """How often a run comes back by itself, and from what. Leaves the mathematics alone."""

    max_preemptions: NotNegativeInt | None = None
    """Preemptions and time limits that a job comes back from; absent: without end."""
    max_crashes: NotNegativeInt = 3
    """Crashes, hangs and bad nodes that a job comes back from."""
    max_without_progress: NotNegativeInt = 2
    """Attempts in a row that trained but saved nothing new, which a job comes back from."""
    hang_after_min: PositiveFloat = 5.0
    """Minutes without progress of any rank until the stacks of all are saved and the attempt ends;
    six times as long before the first step."""
    check_nodes: bool = True
    """Before the first step each rank proves device, memory, arithmetic, network and disk; ``false``: not."""
    exclude_nodes_for_h: NotNegativeFloat = 24.0
    """Hours for which a node that failed its check, or ended two attempts, is left out; 0: never left out."""


class EvaluationConfig(Section):
    """When the validation data are evaluated. At the end they always are."""

    every_epochs: PositiveInt | None = None
    """Epochs between evaluations; absent: 1 unless ``every_steps`` is given."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; absent: by epochs."""


class SlurmConfig(Section):
    """What is asked of Slurm. Leaves the mathematics alone."""

    profile: Annotated[
        str,
        _pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "1 to 64 lower-case letters, digits, '_' or '-', like generic"),
    ] = "generic"
    """A site profile by name: what this cluster wants, in a file of its own."""
    partition: SlurmWord | None = None
    """Partition; absent: the site's default."""
    nodes: PositiveInt | NodeRange = 1
    """Nodes, or ``2-8`` for any number between (the run goes on with as many as each start gets)."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each node; 0: none."""
    gpu_type: Annotated[str, _pattern(GPU_TYPE_PATTERN, "one word like a100 or nvidia_h100")] | None = None
    """Kind of GPU as the site calls it; absent: any."""
    ranks_per_node: PositiveInt | None = None
    """Processes on each node; absent: one a GPU, or one."""
    cpus_per_gpu: PositiveInt | None = None
    """Cores a GPU (a rank, without GPUs), dealt out evenly to the ranks; absent: the site's default."""
    mem_gb: PositiveInt | None = None
    """Memory of each node in GB; absent: the site's default."""
    time_limit: DurationMin | None = None
    """``90min``, ``24h``, ``2-12:00:00``; absent: the partition's."""
    signal_lead_s: SignalLead | None = None
    """Seconds between the warning and the time limit, for the last save; absent: three times the longest
    save so far and a minute, 120 before there is one; never more than half the time limit."""
    account: SlurmWord | None = None
    """Account that is charged."""
    qos: SlurmWord | None = None
    """Quality of service."""
    constraint: SlurmWord | None = None
    """Node features."""
    exclude: SlurmWord | None = None
    """Nodes to leave out."""
    reservation: SlurmWord | None = None
    """Reservation."""
    dependency: SlurmWord | None = None
    """Dependency, as sbatch takes it."""
    mail: Annotated[str, _pattern(MAIL_PATTERN, "an address like ada@example.org")] | None = None
    """Address that Slurm writes to at the end or failure; absent: no mail."""
    extra: dict[PlainName, str | int | bool] = {}
    """More options of sbatch by long name; those that hpc-train owns are refused."""


class EnvironmentConfig(Section):
    """What stands ready on the nodes before Python starts."""

    python: ScriptPath | None = None
    """The interpreter; absent: the one that submits, or in a container its ``python3``."""
    modules: list[Annotated[str, _pattern(MODULE_PATTERN, "a module's name like cuda/12.8")]] = []
    """``module load`` these, in this order."""
    container: ScriptPath | None = None
    """An Apptainer image to run in; absent: none."""
    strict: bool = False
    """Refuse to go on with other versions of Python, torch or this package than a checkpoint was saved with;
    ``false``: warn."""


class SweepConfig(Section):
    """Many runs from one file."""

    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Key path → values; the runs are all combinations, the last key varying fastest."""
    max_parallel: PositiveInt | None = None
    """Runs at a time; absent: no limit."""


class WandbConfig(Section):
    """Where wandb keeps the run."""

    project: Annotated[
        str,
        _pattern(
            r"[^/\\#?%:\x00-\x1f\x7f]{1,128}",
            "1 to 128 characters without '/', '#', '?', '%' or ':', like cifar10",
        ),
    ]
    """Project."""
    entity: (
        Annotated[str, _pattern(r"[A-Za-z0-9_.-]{1,128}", "letters, digits, '_', '.' or '-', like my-team")]
        | None
    ) = None
    """User or team; absent: the account's default."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """``auto``: online where a key is set, else offline."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    """Tags."""


class LoggingConfig(Section):
    """What is written down. metrics.jsonl always is."""

    every_steps: PositiveInt = 10
    """Steps between two training rows."""
    wandb: WandbConfig | None = None
    """wandb; absent: off."""
    loggers: dict[PlainName, Arguments] = {}
    """Plug-in loggers by name, each with its keyword arguments."""


class Experiment(Section):
    """One experiment file."""

    name: Name
    """Names the folder, the Slurm job and the wandb group."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All randomness comes from it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """``auto``: CUDA where there is one; on Slurm it must be there if GPUs were asked for."""
    deterministic: bool | None = None
    """Equal to the bit when run again on the same devices; absent: true on CPU, false on CUDA."""
    task: PlainName
    """classification, or a plug-in's."""
    model: ModelConfig
    data: DataConfig
    optimization: OptimizationConfig
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format of the forward and backward pass."""
    compile: Annotated[
        CompileConfig, BeforeValidator(lambda v: {"enabled": v} if isinstance(v, bool) else v)
    ] = CompileConfig(enabled=False)
    """``false``, ``true``, or torch.compile's settings."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    slurm: SlurmConfig | None = None
    environment: EnvironmentConfig = EnvironmentConfig()
    sweep: SweepConfig = SweepConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def micro_batches(self) -> int:
        """M: micro-batches of a step. Not for ``micro_batch_size: auto``."""
        size = self.optimization.micro_batch_size
        assert isinstance(size, int), "micro_batch_size: auto is resolved before it is used"
        return self.optimization.global_batch_size // size


AugmentConfig.model_rebuild()
