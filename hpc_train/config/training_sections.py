"""The sections of the experiment file that say the mathematics, and how ranks share it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hpc_train.config.fields import (
    Arguments,
    Bounds,
    NotNegativeFloat,
    OptimizerName,
    PartName,
    PlainName,
    PositiveFloat,
    PositiveInt,
    Probability,
    ScheduleName,
    Section,
)


class ModelConfig(Section):
    """What is trained."""

    name: Annotated[PartName, Field(examples=["timm/resnet18"])]
    """``timm/<name>``, ``torchvision/<name>``, ``gpt``, another ``provider/<name>`` or
    ``package.module:factory``."""
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
    """Mean and standard deviation per channel, of values in 0…1.

    ``normalize: weights`` is short for ``{from_weights: true}``.
    """

    mean: Annotated[list[float], Field(examples=[[0.485, 0.456, 0.406]])] = []
    """Mean of each channel."""
    std: Annotated[list[PositiveFloat], Field(examples=[[0.229, 0.224, 0.225]])] = []
    """Standard deviation of each channel."""
    from_weights: bool = False
    """``true``: those that the pretrained weights were trained with, and their interpolation and crop."""


class DataConfig(Section):
    """What it is trained on."""

    name: Annotated[PartName, Field(examples=["digits"])]
    """``torchvision/<class>``, ``imagefolder``, ``digits``, ``synthetic``, ``text``, a plug-in's,
    or ``package.module:factory``."""
    root: str | None = None
    """Folder of the data, or a text file; absent: for data that needs none."""
    args: Arguments = {}
    """Keyword arguments of the data set."""
    image_size: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Side of the square that images are brought to, in pixels; absent: as they are (all must be equal)."""
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the shorter side that evaluation's centre crop keeps with ``image_size`` (ImageNet: 0.875)."""
    augment: AugmentConfig = AugmentConfig()
    """Random changes of training images; absent: none."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized, always with antialiasing."""
    normalize: Annotated[
        NormalizeConfig | None,
        BeforeValidator(lambda v: {"from_weights": True} if v == "weights" else v),
    ] = None
    """Mean and standard deviation per channel, or ``weights``: as the pretrained weights were trained, with
    their interpolation, and their crop as ``eval_crop`` unless that is given; default: the data set's own."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Loader processes a rank; 0: load in the rank itself."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """A sample that can't be read: ``fail`` ends the run, ``skip`` names it and takes another instead."""
    max_bad_samples: PositiveInt = 10
    """With ``on_bad_sample: skip``: different samples of the whole run that may be bad; one more ends it."""


class OptimizerConfig(Section):
    """The optimizer: a name of torch.optim in lower case (``sgd``, ``adamw``), or else of timm (``lamb``)."""

    name: Annotated[OptimizerName, Field(examples=["adamw"])]
    """torch.optim's class in any case, or timm's name; ``torch/…`` and ``timm/…`` say which."""
    lr: Annotated[PositiveFloat, Field(examples=[0.001])]
    """Learning rate at its peak, for G samples a step or, with ``lr_per_batch``, for that many."""
    lr_per_batch: PositiveInt | None = None
    """The batch that ``lr`` is meant for: the rate used is lr * G / lr_per_batch; absent: ``lr`` as it is."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of optimizers that have one; absent: their default."""
    weight_decay: NotNegativeFloat | None = None
    """Weight decay; absent: the optimizer's default."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise learning rates: each layer's is so many times that of the one behind it; absent: off."""
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

    decay: Annotated[float, Field(gt=0, lt=1, examples=[0.9999])]
    """Part of the average that stays at each step."""


class OptimizationConfig(Section):
    """The mathematics of a step, the same on any hardware."""

    epochs: PositiveInt | None = None
    """Passes over the data, of ⌊N/G⌋ steps each; exactly one of ``epochs`` and ``steps``."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    global_batch_size: Annotated[PositiveInt, Field(examples=[256])]
    """G: samples that one optimizer step sees, over all ranks."""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], Field(examples=[64])]
    """Samples of one forward pass of one rank; divides G; or ``auto``."""
    optimizer: Annotated[OptimizerConfig, Field(examples=[{"name": "adamw", "lr": 0.001}])]
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
    """How ranks share the work. None of it changes the mathematics, but for ``sync_batchnorm``."""

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
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """In which order a pipeline's ranks run forward and backward: ``gpipe`` (all forward first), ``1f1b`` (by
    turns: less memory) or ``interleaved`` (1f1b with several stages a rank: less waiting)."""
    stages_per_rank: PositiveInt | None = None
    """Stages that a rank of a pipeline has; absent: 2 with ``interleaved``, else 1."""
    sync_batchnorm: bool = False
    """Normalise over one micro-batch of each rank together, so that results depend on the number of ranks;
    ``false``: over one micro-batch."""
    args: Arguments = {}
    """Keyword arguments of the strategy: ``find_unused_parameters`` of ddp and zero1, or a plug-in's own."""


class CompileConfig(Section):
    """torch.compile."""

    enabled: bool = True
    """``compile: false`` is short for ``{enabled: false}``, ``compile: true`` for all defaults."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode."""
    scope: Literal["blocks", "model"] = "blocks"
    """Compile each repeated block (compiles once, fast), or the whole model."""
    dynamic: bool | None = False
    """Symbolic shapes; ``null``: torch decides, by the order of batch sizes, so not where the run is
    deterministic. All batches of a run have one size, so there is no need."""
    fullgraph: bool = False
    """Fail at a graph break instead of going on in Python."""
    fallback: bool = False
    """Where the compiler fails go on without it, and say so; ``false``: the run ends."""


AugmentConfig.model_rebuild()
