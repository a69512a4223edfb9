"""The sections of the experiment file that define what is trained, and how ranks share the work."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hpc_train.experiment.config.fields import (
    Arguments,
    Bounds,
    DataName,
    FactoryName,
    FloatRange,
    ImageSize,
    ModelName,
    NamePattern,
    NotNegativeFloat,
    OptimizerName,
    PlainName,
    PositiveFloat,
    PositiveInt,
    Probability,
    ScheduleName,
    Section,
)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): only they are trained, and ``also_train``."""

    rank: Annotated[int, Field(ge=1, le=4096, examples=[8])]
    """Rank of the adapters."""
    targets: Annotated[list[NamePattern], Field(min_length=1, examples=[["*.qkv", "*.proj"]])]
    """Patterns of the names of the linear layers that get an adapter."""
    alpha: PositiveFloat | None = None
    """The adapters' product is multiplied by alpha / rank. Default: ``rank``, a factor of 1."""
    also_train: list[NamePattern] = []
    """Patterns of the names of parameters that are trained besides, such as a new head. Default: none."""


#: Suffixes of files of weights.
WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")


#: Value of ``model.init_from``: the weights of the training stage before this one.
OF_STAGE = "stage"


class ModelConfig(Section):
    """The model to train."""

    name: Annotated[ModelName, Field(examples=["timm/resnet18"])]
    """Model: ``timm/<name>``, ``torchvision/<name>``, ``gpt``, ``hf/<name>``, ``smp/<name>``, a
    plug-in's ``provider/<name>``, or ``package.module:factory``."""
    pretrained: bool | str = False
    """Initial weights: ``true`` (pretrained weights from the hub), or the path of a file of weights
    (.safetensors, .pth, .pt, .ckpt, .bin). ``false``: random initialization."""
    args: Arguments = {}
    """Keyword arguments of the model factory. ``num_classes`` comes from the data set unless it is given
    here."""
    init_from: str | None = None
    """Start from the weights of another run (an id, ``name/id``, a folder or a name: its best checkpoint, or
    without ``checkpoint.best`` its newest), of a file of weights (.safetensors, .pth, .pt, .ckpt, .bin), or
    of the training stage before this one (``stage``; see ``stages``). A head of another size and what is
    missing stay random; both are reported. Default: random weights, or ``pretrained``."""
    freeze: list[NamePattern] = []
    """Parameters that are not trained: patterns of their names, like ``"layer1.*"``. What a pattern with a
    leading ``!`` matches is trained (``["*", "!head.*"]``). A BatchNorm layer whose parameters are all frozen
    stays in evaluation mode. Default: all are trained."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of linear layers instead of the layers. ``hpc-train export`` merges them.
    Default: off."""
    channels_last: bool = False
    """Keep images and weights in NHWC memory format, which makes convolutions faster. ``false``: NCHW."""


class AugmentConfig(Section):
    """Random augmentation of training images, computed from random numbers of each sample."""

    hflip: Probability = 0.0
    """Probability of a horizontal flip. 0: off."""
    vflip: Probability = 0.0
    """Probability of a vertical flip. 0: off."""
    crop_padding: Annotated[int, Field(ge=0, le=1024)] = 0
    """Pixels of zero padding on each side before a random crop to the original size. 0: off."""
    random_resized_crop: RandomResizedCropConfig | None = None
    """Crop a random part and resize it to ``data.image_size``. Default: off."""
    randaugment: RandAugmentConfig | None = None
    """Apply random operations of RandAugment (arXiv:1909.13719). Default: off."""
    policy: Literal["autoaugment", "autoaugment_cifar10", "autoaugment_svhn", "trivialaugment"] | None = None
    """Apply the operations of a policy: AutoAugment's for ImageNet, CIFAR-10 or SVHN (arXiv:1805.09501), or
    TrivialAugment (arXiv:2103.10158). Default: off."""
    erasing: Probability = 0.0
    """Probability of erasing a random rectangle (arXiv:1708.04896). 0: off."""
    random_scale: Bounds | None = None
    """For masks and boxes: range of a random factor on the size that images have in evaluation. What exceeds
    ``data.image_size`` is cropped at a random place, what is smaller is padded. Default: off."""
    color_jitter: ColorJitterConfig | None = None
    """Random brightness, contrast, saturation and hue. Default: off."""
    repeats: Annotated[int, Field(ge=1, le=64)] = 1
    """Repeated augmentation (arXiv:1902.05509): a step reads this many times fewer samples, each so often
    with other random numbers. It must divide ``global_batch_size``. An epoch keeps its number of steps, so it
    sees only a part of the samples, as with timm's RepeatAugSampler. 1: off."""


class TransformConfig(Section):
    """A transform of training samples: of torchvision, of timm, or your own."""

    name: Annotated[FactoryName, Field(examples=["my_transforms:train"])]
    """``package.module:factory``, a function or class that returns the transform."""
    args: Arguments = {}
    """Keyword arguments of the factory."""


class ColorJitterConfig(Section):
    """Maximum changes of the colors, applied in random order, as in torchvision's ColorJitter."""

    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Maximum change of the brightness factor from 1. 0: off."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Maximum change of the contrast factor from 1. 0: off."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Maximum change of the saturation factor from 1. 0: off."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Maximum shift of the hue, as a fraction of the color circle. 0: off."""


class RandomResizedCropConfig(Section):
    """Bounds of the random crop, as in torchvision's RandomResizedCrop."""

    scale: Bounds = (0.08, 1.0)
    """Minimum and maximum fraction of the image's area."""
    ratio: Bounds = (0.75, 1.3333333333333333)
    """Minimum and maximum aspect ratio (width / height)."""
    interpolation: Literal["bilinear", "bicubic", "random"] | None = None
    """Interpolation of the crop; ``random``: bilinear or bicubic, for each image. Default:
    ``data.interpolation``."""


class RandAugmentConfig(Section):
    """Settings of RandAugment. timm's ``rand-m9-mstd0.5-inc1`` is ``{operations: timm, magnitude: 9,
    magnitude_std: 0.5}``.
    """

    num_ops: Annotated[int, Field(ge=1, le=8)] = 2
    """Operations per image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of the operations, from 0 to 30, with ``operations: timm`` from 0 to 10."""
    magnitude_std: Annotated[float, Field(ge=0, le=30)] = 0.0
    """Standard deviation of the strength, which is then drawn for each operation. 0: off."""
    operations: Literal["torchvision", "timm"] = "torchvision"
    """Whose operations and ranges: those of torchvision's RandAugment, or of timm's with ``inc1``, which get
    stronger with the magnitude."""
    probability: Probability | None = None
    """Probability of each operation. Default: 1, with ``operations: timm`` 0.5."""


class NormalizeConfig(Section):
    """Mean and standard deviation per channel, for values in the range 0 to 1.

    ``normalize: weights`` is short for ``{from_weights: true}``.
    """

    mean: Annotated[list[float], Field(examples=[[0.485, 0.456, 0.406]])] = []
    """Mean per channel."""
    std: Annotated[list[PositiveFloat], Field(examples=[[0.229, 0.224, 0.225]])] = []
    """Standard deviation per channel."""
    from_weights: bool = False
    """Use the mean, standard deviation, interpolation and crop that the pretrained weights were trained with.
    """


class DataConfig(Section):
    """The data set to train on."""

    name: Annotated[DataName, Field(examples=["digits"])]
    """Data set: a name of the table of data sets, a plug-in's name, or ``package.module:factory``."""
    root: str | None = None
    """Folder of the data, or a text file. Not needed by data sets without files."""
    args: Arguments = {}
    """Keyword arguments of the data set."""
    cache: str | None = None
    """Folder with packed caches of image folders: ``hpc-train prepare`` packs the images of ``root`` into one
    file there, and ranks read that file. Default: ranks read the images one by one. With ``image_list``,
    ``webdataset`` and ``coco``: the folder of their index; default: the user's cache folder."""
    cache_pixels: bool = False
    """With ``cache``: store images decoded, so that ranks do not decode JPEG; the packed file is several
    times larger. Images that random crops decode at reduced size stay JPEG files, so a run remains bitwise
    identical. ``false``: store the image files; images of one size up to 64 × 64 are stored decoded."""
    stage: bool | str = False
    """With ``cache``: copy the packed file to a disk of each node before training starts. ``true``: to
    ``$SLURM_TMPDIR``, else ``$TMPDIR``; or a folder, with the node's environment variables. ``false``: read
    it where it is."""
    image_size: ImageSize | None = None
    """Height and width to which images are resized, in pixels; with masks or boxes a number or
    ``[height, width]``, and what remains beside a resized image is padded. Default: no resizing; all images
    must then have the same size."""
    eval_size: ImageSize | None = None
    """For masks and boxes: the size in the evaluation. Default: ``image_size``."""
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the shorter side that the center crop of the evaluation keeps with ``image_size``
    (ImageNet: 0.875)."""
    transform: Annotated[
        TransformConfig | None, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)
    ] = None
    """Transform of each training sample, before ``image_size`` and ``augment``: ``package.module:factory``,
    or a section with its arguments. Its random numbers are seeded for each sample. Default: none."""
    augment: AugmentConfig = AugmentConfig()
    """Random augmentation of training images. Default: none."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation for resizing images, always with antialiasing."""
    value_range: FloatRange | None = None
    """For image files with gray values of 16 or 32 bits or floats: ``[black, white]``, the values that become
    0 and 255; values outside are clipped. Images of 8 bits keep their values. Default: the upper 8 of 16
    bits; others are an error."""
    exif_orientation: Literal["ignore", "apply"] = "ignore"
    """EXIF orientation of image files and masks: ``ignore`` reads the pixels as they are stored, ``apply``
    turns them as viewers do."""
    max_image_pixels: PositiveInt | None = None
    """Largest number of pixels of an image file; one with more can't be read. Default: that of Pillow,
    178,956,970."""
    normalize: Annotated[
        NormalizeConfig | None, BeforeValidator(lambda v: {"from_weights": True} if v == "weights" else v)
    ] = None
    """Mean and standard deviation per channel; or ``weights``: those of the pretrained weights, with their
    interpolation, and their crop unless ``eval_crop`` is given. Default: those of the data set."""
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = 0
    """Data loader processes per rank. ``auto``: one less than the rank has CPUs, at most 16; with ``device:
    cpu``, which computes on all of them, at most one. 0: load in the rank's own process."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """Whether a sample that can't be read ends the run (``fail``), or is reported and replaced by another
    sample (``skip``)."""
    max_bad_samples: PositiveInt = 10
    """With ``on_bad_sample: skip``: maximum number of different bad samples in the whole run. One more ends
    it."""

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """Return ``image_size`` as (height, width); None where the images keep their size."""
        return _sides(self.image_size)

    @property
    def eval_height_and_width(self) -> tuple[int, int] | None:
        """Return the size in the evaluation of images with masks or boxes."""
        return self.height_and_width if self.eval_size is None else _sides(self.eval_size)


def _sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


class ParameterGroupConfig(Section):
    """Settings of the parameters whose names match."""

    match: Annotated[list[NamePattern], Field(min_length=1, examples=[["head.*"]])]
    """Patterns of parameter names; one that starts with ``!`` excludes what it matches."""
    lr_factor: PositiveFloat = 1.0
    """Factor of the learning rate, multiplied by that of ``layer_decay``."""
    weight_decay: NotNegativeFloat | None = None
    """Weight decay. Default: that of the optimizer."""


class OptimizerConfig(Section):
    """The optimizer: one of torch.optim (``sgd``, ``adamw``) or, if torch has none of that name, of timm
    (``lamb``).
    """

    name: Annotated[OptimizerName, Field(examples=["adamw"])]
    """A class of torch.optim in any case, or a name of timm. ``torch/…`` and ``timm/…`` choose explicitly."""
    lr: Annotated[PositiveFloat, Field(examples=[0.001])]
    """Peak learning rate, for a global batch of G samples or, with ``lr_per_batch``, of that many samples."""
    lr_per_batch: PositiveInt | None = None
    """Batch size that ``lr`` refers to: the learning rate is lr * G / lr_per_batch. Default: ``lr`` is used
    unscaled."""
    momentum: Annotated[float, Field(ge=0, lt=1, examples=[0.9])] | None = None
    """Momentum, for optimizers that have one. Default: the optimizer's default."""
    weight_decay: NotNegativeFloat | None = None
    """Weight decay. Default: the optimizer's default."""
    layer_decay: Annotated[float, Field(gt=0, le=1, examples=[0.75])] | None = None
    """Layer-wise learning rate decay: each layer's rate is this factor times that of the next layer. Default:
    off."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to norms and biases (tensors of fewer than two dimensions) too."""
    groups: list[ParameterGroupConfig] = []
    """Learning rate and weight decay of some parameters, by patterns of their names. The first group that
    matches a parameter applies. Default: the same for all."""
    args: Arguments = {}
    """Further keyword arguments of the optimizer (betas, eps, nesterov, …)."""


class ScheduleConfig(Section):
    """Learning rate schedule: a factor of the peak learning rate per step."""

    name: ScheduleName = "constant"
    """A schedule listed in the table of schedules."""
    warmup_epochs: NotNegativeFloat | None = None
    """Epochs of linear warm-up; may be fractional. Default: ``warmup_steps``."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up. Default: ``warmup_epochs``, otherwise no warm-up."""
    min_factor: Probability = 0.0
    """Final or minimum factor after the warm-up; the table of schedules shows which."""
    args: Arguments = {}
    """Arguments of the schedule, as the table of schedules lists them."""


class EmaConfig(Section):
    """An exponential moving average (EMA) of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1, examples=[0.9999])]
    """Decay: the fraction of the average that is kept at each step."""


class LossConfig(Section):
    """The loss, one of the task's. ``loss: bce`` is short for ``{name: bce}``."""

    name: Annotated[PlainName, Field(examples=["cross_entropy"])]
    """A loss of the task; the table of losses lists them."""
    args: Arguments = {}
    """Arguments of the loss, as the table of losses lists them."""


class ProfileConfig(Section):
    """A profile of some steps of rank 0: a trace, and a table of what limits them."""

    after_steps: PositiveInt = 10
    """Steps of the attempt before the profile begins: the first ones compile and read cold data."""
    steps: PositiveInt = 5
    """Steps to profile."""


class OptimizationConfig(Section):
    """How the model is optimized. The result does not depend on the hardware."""

    epochs: PositiveInt | None = None
    """Passes over the data, of ⌊N/G⌋ steps each. Give exactly one of ``epochs`` and ``steps``."""
    steps: PositiveInt | None = None
    """Number of optimizer steps. Give exactly one of ``epochs`` and ``steps``."""
    global_batch_size: Annotated[PositiveInt, Field(examples=[256])]
    """G: samples per optimizer step, over all ranks."""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], Field(examples=[64])]
    """Samples per forward pass of one rank; must divide the global batch size. ``auto``: the largest size
    that fits into the GPUs' memory. Gradients are accumulated over the micro-batches of a step."""
    optimizer: Annotated[OptimizerConfig, Field(examples=[{"name": "adamw", "lr": 0.001}])]
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate schedule. Default: constant."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum global L2 norm of the gradient. Default: no clipping."""
    loss: Annotated[
        LossConfig | None, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)
    ] = None
    """The loss: a name, or a section. Default: the task's first one in the table of losses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1, examples=[0.1])] = 0.0
    """Label smoothing: the fraction of the target that is spread over all classes. 0: off."""
    on_non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite on any rank: ``stop`` ends the run; ``skip``
    skips the weight update; ``rollback`` returns to the newest checkpoint and skips the data of that step.
    Keep ``stop`` until ``replay`` has shown the cause. ``skip`` is for rare bad batches, ``rollback`` for
    runs in which NaN follows from earlier updates."""
    max_non_finite: PositiveInt = 10
    """With ``skip`` or ``rollback``: maximum number of such steps in the whole run. One more ends it. Data
    that ``on_spike: rollback`` skips count, too."""
    on_spike: Literal["report", "skip", "rollback"] | None = None
    """Reaction to a loss or gradient norm far above those of the last 128 steps:
    ``report`` records the step and its samples in ``spikes.jsonl``; ``skip`` also skips the weight update;
    ``rollback`` returns to the newest checkpoint and skips the data of that step, at most
    ``max_non_finite`` times. Start with ``report``. ``skip`` is for single bad batches, ``rollback`` for
    runs whose loss stays high after a spike. Default: off."""
    ema: EmaConfig | None = None
    """Exponential moving average of the weights. Default: off."""
    mixup: NotNegativeFloat = 0.0
    """Alpha of mixup (arXiv:1710.09412), which averages pairs of samples of a micro-batch. 0: off."""
    cutmix: NotNegativeFloat = 0.0
    """Alpha of CutMix (arXiv:1905.04899), which pastes a rectangle of another image. 0: off."""
    cutmix_probability: Probability = 0.5
    """With both: probability that a micro-batch gets CutMix and not mixup."""


class ParallelConfig(Section):
    """How ranks share the work. Only ``sync_batchnorm`` changes the training result."""

    strategy: PlainName = "ddp"
    """A name of the table of strategies, or a plug-in's."""
    shard: PositiveInt | None = None
    """Number of ranks that shard one copy of the parameters. Default: depends on the strategy."""
    replicate: PositiveInt | None = None
    """Number of copies of a sharded model (hsdp). Default: depends on the strategy."""
    tensor: PositiveInt | None = None
    """Tensor parallel degree: number of ranks that share each layer. Default: 1, or by strategy."""
    pipeline: PositiveInt | None = None
    """Number of pipeline stages. Default: 1, or by strategy."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule: ``gpipe`` (all forward passes first), ``1f1b`` (one forward, one backward: needs
    less memory) or ``interleaved`` (1f1b with several stages per rank: shorter bubble)."""
    stages_per_rank: PositiveInt | None = None
    """Pipeline stages per rank. Default: 2 with ``interleaved``, otherwise 1."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over one micro-batch of every rank, so that results depend on the number
    of ranks. ``false``: over one micro-batch."""
    args: Arguments = {}
    """Keyword arguments of the strategy: ``find_unused_parameters`` of ddp and zero1, or a plug-in's own."""


class CompileConfig(Section):
    """Settings of torch.compile."""

    enabled: bool = True
    """Whether to compile. ``compile: false`` is short for ``{enabled: false}``, ``compile: true`` for all
    defaults."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile."""
    scope: Literal["blocks", "model"] = "blocks"
    """Compile each repeated block (one short compilation), or the whole model."""
    dynamic: bool | None = False
    """Compile with symbolic shapes. ``null``: torch decides by the order of batch sizes, which is rejected
    for deterministic runs. All batches of a run have the same size, so it is rarely needed."""
    fullgraph: bool = False
    """Fail at a graph break instead of falling back to eager execution there."""
    fallback: bool = False
    """Continue without compilation if the compiler fails, and log it. ``false``: the run ends."""


AugmentConfig.model_rebuild()
