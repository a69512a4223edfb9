"""Every key of the experiment file, its type, bounds, unit and "off" value (DESIGN §4, a contract).

Only shapes and bounds of single values stand here and in the modules of sections; what two keys may not say
together is in ``rules``. Each field's docstring is its help text in the JSON Schema and the reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpc_train.config.cluster_sections import EnvironmentConfig, SlurmConfig
from hpc_train.config.fields import (
    Arguments,
    Hours,
    Minutes,
    Name,
    NotNegativeInt,
    PlainName,
    PositiveInt,
    Section,
    pattern,
)
from hpc_train.config.training_sections import (
    CompileConfig,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
)

#: What plug-ins are told, from one place.
__all__ = ["DataConfig", "Experiment", "ModelConfig"]


class CheckpointConfig(Section):
    """When the run is saved. The last step always is."""

    every_min: Minutes | None = None
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
    hang_after_min: Minutes = 5.0
    """Minutes without progress of any rank until the stacks of all are saved and the attempt ends;
    six times as long before the first step."""
    check_nodes: bool = True
    """Before the first step each rank proves device, memory, arithmetic, network and disk; ``false``: not."""
    exclude_nodes_for_h: Hours = 24.0
    """Hours for which a node that failed its check, or ended two attempts, is left out; 0: never left out."""


class EvaluationConfig(Section):
    """When the validation data are evaluated. At the end they always are."""

    every_epochs: PositiveInt | None = None
    """Epochs between evaluations; absent: 1 unless ``every_steps`` is given."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; absent: by epochs."""


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
        pattern(
            r"[^/\\#?%:\x00-\x1f\x7f]{1,128}",
            "1 to 128 characters without '/', '#', '?', '%' or ':', like cifar10",
        ),
        Field(examples=["my-project"]),
    ]
    """Project."""
    entity: (
        Annotated[str, pattern(r"[A-Za-z0-9_.-]{1,128}", "letters, digits, '_', '.' or '-', like my-team")]
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

    name: Annotated[Name, Field(examples=["my-experiment"])]
    """Names the folder, the Slurm job and the wandb group."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All randomness comes from it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """``auto``: CUDA where there is one; on Slurm it must be there if GPUs were asked for."""
    deterministic: bool | None = None
    """Equal to the bit when run again on the same devices; absent: true on CPU, false on CUDA."""
    task: Annotated[PlainName, Field(examples=["classification"])]
    """classification, or a plug-in's."""
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
    """Number format of the forward and backward pass; ``fp8``: bf16, the blocks' linear layers in float8."""
    compile: Annotated[
        CompileConfig, BeforeValidator(lambda v: {"enabled": v} if isinstance(v, bool) else v)
    ] = CompileConfig(enabled=False)
    """``false``, ``true``, or torch.compile's settings."""
    activation_checkpointing: Annotated[
        str,
        pattern(
            "off|blocks|selective|every [1-9][0-9]{0,3}", "off, blocks, selective or every n, like every 2"
        ),
    ] = "off"
    """Compute activations again in backward instead of keeping them: of all ``blocks``, of ``every n``-th
    block, or ``selective``: of all but matrix products and attention; ``off``: keep them."""
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

    def with_micro_batch_size(self, size: int) -> Experiment:
        """Return the same with a number: what ``auto`` came to."""
        optimization = self.optimization.model_copy(update={"micro_batch_size": size})
        return self.model_copy(update={"optimization": optimization})
