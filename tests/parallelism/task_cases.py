"""Each task with models and data sources, trained under every strategy and compared with plain PyTorch.

Without torch. The main cases (``cases``) combine features on one task and data from no disk; these read real
files, so that source, loader, model and task are compared together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate import rules
from tests.parallelism.cases import STEPS, STRATEGIES, VIT

MICRO_BATCH_SIZE = 2
SEED = 5
#: A model of transformers is a folder with its configuration.
_HF_VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1,
}  # fmt: skip
_HF_GPT2 = {
    "model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": 257,
    "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
#: Folder below the data → its config.json.
CONFIGURATIONS: dict[str, dict[str, Any]] = {"vit": _HF_VIT, "gpt2": _HF_GPT2}
_VIT = read_value(VIT.partition("=")[2])[0]
_LLAMA = {
    "style": "llama", "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "dim": 16, "tie_embeddings": False,
}  # fmt: skip
#: With random weights BatchNorm over one or two pixels amplifies rounding, and so it is fine-tuned.
_SSDLITE = {
    "name": "torchvision/ssdlite320_mobilenet_v3_large",
    "pretrained": "ROOT/ssdlite.safetensors",
    "freeze": ["backbone.*"],
}
_TOKENS = {
    "name": "tokens", "root": "ROOT/corpus", "args": {"tokenizer": "bytes", "sequence_length": 16},
}  # fmt: skip


@dataclass(frozen=True)
class TaskCase:
    """A task, a model and a data source. ROOT in a text is the folder of the data."""

    title: str
    task: str
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    lr: float = 0.01
    #: M; 3 leaves one of two ranks a spare slot.
    micro_batches: int = 3
    #: Whether float64 takes too long for a test: it is left to the report.
    is_large: bool = False

    @property
    def needs_transformers(self) -> bool:
        return str(self.model["name"]).startswith("hf/")

    def experiment(self, root: Path | str, strategy: str = "ddp", precision: str = "fp64") -> Experiment:
        return Experiment.model_validate(self.file(root, strategy, precision))

    def file(self, root: Path | str, strategy: str = "ddp", precision: str = "fp64") -> dict[str, Any]:
        """Return what a file for these data says."""
        text = json.dumps({"model": self.model, "data": self.data}).replace("ROOT", str(root))
        return {
            "name": "tasks",
            "task": self.task,
            "seed": SEED,
            "optimization": {
                "steps": STEPS,
                "global_batch_size": MICRO_BATCH_SIZE * self.micro_batches,
                "micro_batch_size": MICRO_BATCH_SIZE,
                "optimizer": {"name": "sgd", "lr": self.lr, "momentum": 0.9},
                "schedule": {"name": "constant"},
            },
            "precision": precision,
            "parallel": {"strategy": strategy},
            **json.loads(text),
        }


def _images(name: str, root: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "root": f"ROOT/{root}", "args": args}


CASES = (
    TaskCase(
        "`classification`: `timm/`, `image_list`", "classification", _VIT, _images("image_list", "list")
    ),
    TaskCase(
        "`classification`, several labels: `timm/`, `image_list`",
        "classification",
        _VIT,
        _images("image_list", "list", target="classes", target_column=["a", "b", "c"]),
    ),
    TaskCase(
        "`classification`: `hf/` (ViT), `huggingface`",
        "classification",
        {"name": "hf/ROOT/vit"},
        _images("huggingface", "saved", target_column="class"),
    ),
    TaskCase(
        "`regression`: `timm/`, `webdataset`",
        "regression",
        _VIT,
        _images(
            "webdataset", "shards", train="train-{0..1}.tar", val="val.tar",
            target="number", target_member="json.number",
        ),
    ),
    TaskCase(
        "`segmentation`: `torchvision/lraspp_mobilenet_v3_large`, `segmentation_folder`",
        "segmentation",
        {"name": "torchvision/lraspp_mobilenet_v3_large"},
        _images("segmentation_folder", "scenes", num_classes=3),
        lr=1e-5, micro_batches=2, is_large=True,
    ),
    TaskCase(
        "`detection`: `torchvision/ssdlite320_mobilenet_v3_large`, `coco`",
        "detection",
        _SSDLITE,
        _images("coco", "coco"),
        lr=1e-4, micro_batches=2, is_large=True,
    ),
    TaskCase("`causal_lm`: `gpt` (llama), `tokens`", "causal_lm", {"name": "gpt", "args": _LLAMA}, _TOKENS),
    TaskCase("`causal_lm`: `hf/` (GPT-2), `tokens`", "causal_lm", {"name": "hf/ROOT/gpt2"}, _TOKENS),
)  # fmt: skip
#: All of its parameters are trained, in float64: in the tests, not in the report.
DETECTOR = TaskCase(
    "`detection`: a small Faster R-CNN, `coco`",
    "detection",
    {"name": "tests.tasks.detectors:tiny"},
    _images("coco", "coco"),
    lr=0.05,
)
BY_TITLE = {case.title: case for case in (*CASES, DETECTOR)}


@dataclass(frozen=True)
class Cell:
    """One training of a case."""

    case: TaskCase
    strategy: str
    precision: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.case.title}, {self.strategy}, {self.precision}, {self.ranks} ranks"


def cells() -> list[Cell]:
    """Return what the report trains: float64 under every strategy that validation allows on two ranks, ddp
    on one rank too, and fp32 under ddp.
    """
    found = [
        Cell(case, "ddp", precision, ranks)
        for case in CASES
        for precision in ("fp64", "fp32")
        for ranks in (1, 2)
    ]
    others = [Cell(case, strategy, "fp64", 2) for case in CASES for strategy in STRATEGIES[1:]]
    return found + [cell for cell in others if refused(cell.case, cell.strategy) is None]


def refused(case: TaskCase, strategy: str) -> Problem | None:
    """Return why a file can't say this; None where it can, or where only its ranks find out."""
    problems = rules.check(case.experiment("/", strategy), check_names=False)
    return problems[0] if problems else None
