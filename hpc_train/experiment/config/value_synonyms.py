"""Names of values in other tools, and of the models and data sets of their hubs → the value here.

``remedies``, ``translations`` and the rules on names of parts read it to suggest replacements.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.synonyms import table_of
from hpc_train.registry import as_factory, nearest, parts

#: Sections that follow a metric.
_FOLLOWING = ("checkpoint.best", "early_stopping", "sweep.search")
_MODE = {"min": "minimize minimise minimum lower", "max": "maximize maximise maximum higher"}
_METRIC = {
    "loss": "val_loss eval_loss validation_loss",
    "accuracy": (
        "acc val_acc val_accuracy eval_accuracy validation_accuracy top1 top_1 acc1 accuracy_top1 "
        "accuracy_score accuracy/top1"
    ),
    "accuracy_top5": "top5 top_5 acc5 val_top5",
    "miou": "mean_iou val_miou val_iou",
    "map": "bbox_map coco/bbox_map val_map",
    "perplexity": "ppl val_ppl val_perplexity",
}
#: Key of the file → its value → the value's names in other tools.
_VALUES: dict[str, dict[str, str]] = {
    "device": {"cuda": "gpu gpus nvidia cuda use_cuda"},
    "program.style": {"key=value": "hydra omegaconf", "--key=value": "argparse click absl fire --key"},
    "program.per": {"rank": "gpu task process worker", "node": "machine host", "job": "once run"},
    "precision": {
        "fp32": "32 float float32 torch.float32 32_true full high highest no",
        "bf16": (
            "bfloat16 bf16_mixed bf16_true mixed amp use_amp autocast mixed_precision mixed_bf16 use_bf16"
        ),
        "fp16": (
            "16 float16 half half_precision 16_mixed 16_true fp16_mixed mixed_fp16 mixed_float16 use_fp16 "
            "precision"
        ),
        "fp64": "64 double float64 64_true",
        "tf32": "tensorfloat32",
        "fp8": "8 float8 e4m3",
    },
    "parallel.strategy": {
        "ddp": (
            "dp data_parallel none single auto distributed_data_parallel horovod ddp_spawn "
            "ddp_strategy ddp_find_unused_parameters_true "
            "ddp_find_unused_parameters_false mirrored single_device"
        ),
        "fsdp": (
            "fsdp2 zero3 zero_3 full_shard fully_sharded deepspeed deepspeed_stage_3 "
            "fully_sharded_data_parallel fsdp_native fsdp_strategy deepspeed_strategy 3"
        ),
        "zero2": "zero_2 shard_grad_op deepspeed_stage_2 2",
        "zero1": "zero zero_1 deepspeed_stage_1 zero_redundancy_optimizer 1",
        "hsdp": "hybrid_shard",
        "tensor": "tp tensor_parallel",
        "pipeline": "pp pipeline_parallel",
    },
    "task": {
        "classification": (
            "image_classification classify cls classifier multiclass multilabel multi_label binary"
        ),
        "segmentation": "semantic_segmentation image_segmentation segment seg",
        "detection": "object_detection detect det",
        "regression": "image_regression regress regressor",
        "causal_lm": (
            "lm llm gpt language_modeling language_model clm text_generation pretraining "
            "causal_language_modeling"
        ),
    },
    "optimization.optimizer.name": {
        "adamw": (
            "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fusedadam adamw_8bit adamw_bnb_8bit"
        ),
        "sgd": "sgd_momentum momentum_sgd",
        "lion": "lion_pytorch",
        "adafactor": "adafactor_torch",
    },
    "optimization.schedule.name": {
        "cosine": (
            "cosine_annealing cosine_annealing_lr cos cosine_with_warmup cosine_decay cosine_lr "
            "cosine_lr_scheduler cosine_annealing_warm_restarts cosine_with_restarts cosine_warmup "
            "linear_warmup_cosine_annealing_lr warmup_cosine cosine_with_min_lr one_cycle one_cycle_lr "
            "onecycle "
            "reduce_lr_on_plateau reduce_on_plateau plateau cyclic_lr cosine_scheduler warmup_cosine_lr"
        ),
        "constant": "none fixed const constant_with_warmup constant_lr",
        "step": "step_lr step_lr_scheduler step_decay",
        "multistep": "multi_step multi_step_lr multi_step_lr_scheduler warmup_multi_step_lr",
        "exponential": "exp exponential_lr exponential_decay",
        "linear": "linear_lr linear_with_warmup linear_decay linear_warmup",
        "poly": "polynomial polynomial_lr poly_lr poly_lr_scheduler polynomial_decay",
    },
    "optimization.loss.name": {
        "cross_entropy": (
            "ce cross_entropy_loss crossentropy categorical_crossentropy sparse_categorical_crossentropy nll "
            "nll_loss softmax label_smoothing_cross_entropy soft_target_cross_entropy"
        ),
        "bce": "bce_loss bce_with_logits bce_with_logits_loss binary_cross_entropy binary_crossentropy",
        "focal": "focal_loss sigmoid_focal_loss",
        "dice": "dice_loss soft_dice",
        "mse": "mse_loss l2 l2_loss mean_squared_error",
        "mae": "l1 l1_loss mean_absolute_error",
        "huber": "huber_loss smooth_l1 smooth_l1_loss",
    },
    "data.normalize": {
        "{mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}": "imagenet imagenet_default normalize",
        "weights": "pretrained model from_weights",
    },
    "data.augment.policy": {
        "autoaugment": "v0 original imagenet auto_augment aa",
        "autoaugment_cifar10": "cifar10",
        "autoaugment_svhn": "svhn",
        "trivialaugment": "trivial_augment trivial_augment_wide ta_wide",
    },
    "sweep.search.method": {"tpe": "bayes bayesian optuna"},
    "activation_checkpointing": {
        "blocks": "full all activation_checkpointing gradient_checkpointing grad_checkpointing yes true on",
        "off": "none no false",
    },
    "compile.mode": {"max-autotune": "max_autotune", "reduce-overhead": "reduce_overhead"},
    "parallel.schedule": {"1f1b": "one_f_one_b pipedream", "interleaved": "interleaved_1f1b"},
    "logging.wandb.mode": {"offline": "dryrun disabled"},
    "data.on_bad_sample": {"skip": "ignore", "fail": "raise"},
}
#: Packages whose classes people name in full.
_LIBRARIES = ("torch", "nn", "optim", "timm", "transformers", "keras", "tf", "lr_scheduler", "bitsandbytes")
_HUB = re.compile(r"^(hf[-_]hub:|hf:|https?://huggingface\.co/(datasets/)?)")


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_./-]", "", name[:100].lower())


for _section in _FOLLOWING:
    _VALUES |= {f"{_section}.mode": _MODE, f"{_section}.metric": _METRIC}
VALUES = {
    key: {_squeezed(name): value for name, value in table_of(values).items()}
    for key, values in _VALUES.items()
}
#: Start of a model's or data set's name → the provider here.
_PROVIDERS = {
    "timm": "timm",
    "torchvision": "torchvision",
    "models": "torchvision",
    "hf": "hf",
    "huggingface": "hf",
    "transformers": "hf",
    "smp": "smp",
    "segmentation_models_pytorch": "smp",
}
_OF_TORCHVISION = "CIFAR10 CIFAR100 MNIST FashionMNIST SVHN STL10 Food101 Cityscapes Flowers102 OxfordIIITPet"
#: Names of data sets, squeezed → the name here.
_DATA_SETS = {name.lower(): f"torchvision/{name}" for name in _OF_TORCHVISION.split()} | table_of(
    {
        "imagefolder": "imagefolder folder imagenet imagenet1k directory images imagedirectory",
        "image_list": "csv imagecsv filelist imagelist annotations",
        "coco": "cocodetection cocodataset mscoco coco2017",
        "text": "txt textfile textdataset",
        "webdataset": "wds tar webdatasets",
        "synthetic": "fakedata fake random dummy dummydata",
        "digits": "sklearndigits loaddigits",
    }
)


def value_for(path: KeyPath, value: object) -> str | None:
    """Return the value of the key ``path`` that other tools call ``value``."""
    if isinstance(value, bool | dict | list) or value is None:
        return None
    if naming := _NAMES.get(path):
        return naming(str(value))
    text = str(value).partition(":")[0] if path == ("device",) else without_module(str(value))
    choices = VALUES.get(dotted(path), {})
    plain = _squeezed(text)
    if meant := next((choice for choice in choices.values() if _squeezed(choice) == plain), None):
        return meant
    is_class = text != str(value) or path[-1] == "strategy"
    return choices.get(plain, text.lower() if is_class and text.lower() != value else None)


def without_module(text: str) -> str:
    """Return ``SGD`` for ``torch.optim.SGD``; other text unchanged."""
    module, dot, name = text.rpartition(".")
    return name if dot and module.partition(".")[0] in _LIBRARIES and name.isidentifier() else text


def model_name(text: str) -> str | None:
    """Return the name of a model as the file has it, for one of another tool; None if it is the same."""
    if as_factory(text) or text.endswith(".py"):
        return None
    hub = _HUB.sub("", text)
    head, separator, name = _split(hub)
    if provider := _PROVIDERS.get(head):
        name = f"{provider}/{name}"
    elif not separator or separator == ".":
        name = head if head in parts("models") else nearest(head, ["gpt"]) or f"timm/{hub.lower()}"
    else:
        close = nearest(head, parts("models"))
        name = f"{close}/{name}" if close and hub == text else f"hf/{hub}"
    return None if name == text else name


def data_name(text: str) -> str | None:
    """Return the name of a data set as the file has it, for one of another tool; None if it is the same."""
    if as_factory(text) or text.endswith(".py"):
        return None
    hub = _HUB.sub("", text)
    head, separator, name = _split(hub)
    plain = _squeezed(name if separator == "." or head == "torchvision" else hub)
    if spelling := _DATA_SETS.get(plain):
        name = spelling
    elif head == "torchvision":
        name = f"torchvision/{name}"
    elif "/" in hub:
        close = nearest(head, parts("datasets"))
        name = f"{close}/{name}" if close and hub == text else f"huggingface/{hub}"
    else:
        return nearest(hub.lower(), parts("datasets"))
    return None if name == text else name


def _split(text: str) -> tuple[str, str, str]:
    """Return provider, separator and name of ``timm.models.resnet18``, ``timm:resnet18`` or ``timm/x``."""
    separator = re.search(r"[.:/]", text)
    if separator is None:
        return text, "", text
    head, rest = text[: separator.start()], text[separator.end() :]
    return head, separator[0], re.sub(r"^(models|datasets)[./:]", "", rest)


_NAMES: dict[KeyPath, Callable[[str], str | None]] = {
    ("model", "name"): model_name,
    ("data", "name"): data_name,
}
