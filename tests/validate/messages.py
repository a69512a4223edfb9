"""The cases of ``messages.golden``: a small bad file each, and the lines that report what is wrong.

``python -m tests.validate.messages`` writes the lines again after a change of wording; review the diff. A
case is a line ``> FILE | CHANGE | CHANGE``. Below it are the lines with their codes; none for a valid file.
A change is ``KEY=VALUE`` of the command line, or

    OLD -> NEW      a replacement in the file, all occurrences
    + TEXT          text after the file
    = TEXT          another file
    ranks 8/2/4     the start on 8 ranks, 2 per node, at least 4 (the latter two may be missing)
    without NAME    the package NAME is not installed
    own parts       the user's modules are looked up too
    plan            the plan of a valid file; ``plan here``: for this machine
    remarks         remarks on a valid file

with escapes as in Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import ProblemLine
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.plan.staged_file import load_stages
from hpc_train.experiment.validate import logging_rules, model_facts
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.experiment.validate.own_parts import missing_parts
from hpc_train.experiment.validate.rules import check_start
from hpc_train.experiment.validate.task_rules import remarks
from tests.config.files import GOOD

GOLDEN = Path(__file__).with_name("messages.golden")
#: Mistakes of people who come from other tools.
NEWCOMERS = Path(__file__).with_name("newcomers.golden")
TEXT = """\
name: letters
task: causal_lm
model: {name: gpt}
data: {name: text, root: some.txt}
optimization:
  steps: 3
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1}
"""
DETECTION = TEXT.replace("causal_lm", "detection").replace("gpt", "torchvision/fasterrcnn_resnet50_fpn_v2")
MASKS = GOOD.replace("classification", "segmentation").replace(
    "digits\n", "segmentation_folder\n  root: x\n  args: {num_classes: 3}\n"
)
DIGITS = """\
name: digits
task: classification
model:
  name: timm/test_resnet
data:
  name: digits
optimization:
  epochs: 2
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
"""
PROGRAM = """\
name: own
program:
  command: [python, train.py]
  args: {lr: 0.1}
"""
FILES = {
    "good": GOOD,
    "program": PROGRAM,
    "digits": DIGITS,
    "text": TEXT,
    "staged": DIGITS
    + """\
stages:
  - optimization: {epochs: 1}
  - model: {init_from: stage}
  - evaluate: true
  - export: weights.safetensors
""",
    "boxes": DETECTION.replace("text, root: some.txt", "coco, root: coco"),
    "masks": MASKS,
    "gpt": TEXT.replace("{name: gpt}", "{name: gpt, args: {tie_embeddings: false}}"),
    "images": TEXT.replace("causal_lm", "classification")
    .replace("name: gpt", "name: acme.models:net")
    .replace("name: text, root: some.txt", "name: imagefolder, root: images, cache: packs"),
    "own": """
name: x
task: "own_parts:Task"
model: {name: "own_parts:build_net"}
data: {name: "own_parts:build_net"}
optimization: {steps: 4, global_batch_size: 8, micro_batch_size: 8, optimizer: {name: sgd, lr: 0.1}}
""",
}
#: The user's modules.
MODULES = {
    "own_parts.py": """
raise RuntimeError("imported")

def build_net(num_classes): ...
class Task: ...
if True:
    from os import path as renamed
other, (nested, *rest) = 1, (2, 3)
""",
    "broken.py": "def build(:\n",
    "starred.py": "from own_parts import *\n",
    "dynamic.py": "globals()['build'] = None\n",
    "lazy.py": "def __getattr__(name): ...\n",
    "pack/__init__.py": "raise RuntimeError('imported')\n",
    "pack/inner/nets.py": "def build(): ...\n",
}
NAMES = {
    "timm": ["resnet50", "resnet18", "test_resnet", "vit", "vit_tiny_patch16_224", "convnext_tiny"],
    "torchvision": ["resnet18", "resnet50", "fasterrcnn_resnet50_fpn_v2"],
    "datasets": ["CIFAR10", "Food101", "MNIST"],
    "smp": ["unet", "fpn"],
    "smp_encoders": ["resnet18", "resnet34"],
    "timm_optimizers": ["adahessian", "adamw", "adamp", "kron", "lamb", "sgdp", "lion", "muon"],
    "timm_optimizers/lamb": ["params", "lr", "betas", "eps", "weight_decay", "max_grad_norm"],
    "timm_optimizers/lion": ["params", "lr", "betas", "weight_decay", "caution"],
}
#: Facts of models, as the child process reports them (tests/strategies/test_model_facts.py).
FACTS: dict[str, dict[str, Any]] = {
    "timm/resnet50": {"has_batchnorm": True},
    "timm/test_resnet": {"shared": {}, "dropout_key": None, "most_stages": 3},
    "timm/vit_tiny_patch16_224": {
        "has_batchnorm": False,
        "shared": {"heads of blocks.0.attn (num_heads)": 3, "columns of blocks.0.attn.qkv": 192},
        "dropout_key": None,
        "most_stages": 12,
    },
}
#: Tensors of models, as the child process reports them.
TENSORS: dict[str, dict[str, Any]] = {
    "timm/test_resnet": {"tensors": {"layer1.conv1.weight": [16, 16], "fc.weight": [10, 16]}, "head": []},
    "timm/resnet50": {"tensors": {"layer1.conv1.weight": [64, 16], "fc.weight": [10, 16]}, "head": []},
    "timm/vit": {"tensors": {"blocks.0.attn.weight": [16, 16]}, "head": []},
}


def answer(question: str | None) -> dict[str, Any]:
    """Answer as the child process does that imports timm, torchvision and smp."""
    if question is None:
        return NAMES
    if isinstance(words := json.loads(question), dict):
        return TENSORS.get(words["tensors"][0], {})
    name, args, *size = words
    facts = FACTS.get(name, {})
    if "attn_drop_rate" in args:
        facts = facts | {"dropout_key": "model.args.attn_drop_rate"}
    if "drop" in args:
        refusal = f"model.args: {name} takes no argument 'drop'; did you mean 'drop_rate'?"
        facts = facts | {"args_refusal": refusal}
    if name == "timm/vit" and size and args.get("img_size", 224) != size[0]:
        refusal = f"Input height ({size[0]}) doesn't match model (224)."
        facts = facts | {"size_refusal": refusal, "fitting_size": 224, "takes_img_size": True}
    if name == "smp/fpn" and size:
        facts = facts | {"size_refusal": "Wrong shape", "fitting_size": [192, 256], "takes_img_size": False}
    return facts


def cases(golden: Path = GOLDEN) -> dict[str, list[str]]:
    """Return the lines below each case of a golden file; those of comments have none."""
    rows: dict[str, list[str]] = {}
    for line in golden.read_text(encoding="utf-8").splitlines():
        if line.startswith((">", "#")):
            assert line not in rows, f"twice: {line}"
            rows[line] = []
        else:
            rows[next(reversed(rows))].append(line)
    return rows


def lines_of(case: str) -> list[str]:
    """Return the code and the line of each problem of a case, in a temporary folder."""
    name, *changes = case.removeprefix("> ").split(" | ")
    with without_libraries() as patch:
        for file, content in MODULES.items() if name in {"own", "images"} else ():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(content)
        found = list(_lines(FILES[name], [_unescaped(change) for change in changes], patch))
        assert all(isinstance(line, ProblemLine) and line.code for line in found), found
        return [f"{line.code}  {line}" for line in found if isinstance(line, ProblemLine)]


@contextmanager
def without_libraries() -> Iterator[pytest.MonkeyPatch]:
    """In a temporary folder, with the names and facts of ``answer`` in place of those of timm and others."""
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_facts, "_answer", answer)
        patch.setattr(model_facts, "_refusals", {})
        patch.setattr("sys.executable", "python")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield patch


def text_of(case: str) -> str:
    """Return the content of the file of a case that only changes the file."""
    name, *changes = case.removeprefix("> ").split(" | ")
    return changed(FILES[name], [_unescaped(change) for change in changes])[0]


def _unescaped(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape") if "\\" in text else text


def _lines(text: str, changes: list[str], patch: pytest.MonkeyPatch) -> Iterator[str]:
    ranks = None
    text, others = changed(text, changes)
    for change in others:
        if change.startswith("without "):
            missing = change.removeprefix("without ")
            patch.setattr(logging_rules, "find_spec", lambda name, missing=missing: name != missing or None)
        elif change.startswith("ranks "):
            ranks = [int(number) for number in change.removeprefix("ranks ").split("/")]
    words = ("without ", "ranks ", "own parts", "plan", "remarks")
    overrides = [change for change in others if not change.startswith(words)]
    Path("exp.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        loaded = load_stages(Path("exp.yaml"), overrides)[0]
    except BadFileError as error:
        yield from error.problems
        return
    yield from _later_lines(loaded, changes, ranks)


def changed(text: str, changes: list[str]) -> tuple[str, list[str]]:
    """Return the file after the changes of its text, and the changes of other kinds."""
    others = []
    for change in changes:
        old, arrow, new = change.partition(" -> ")
        if change.startswith("+ "):
            text += change[2:]
        elif change.startswith("= "):
            text = change[2:]
        elif arrow:
            assert old in text, f"not in the file: {old}"
            text = text.replace(old, new)
        else:
            others.append(change)
    return text, others


def _later_lines(loaded: Loaded, changes: list[str], ranks: list[int] | None) -> Iterator[str]:
    """Yield the lines on a valid file: of a start, of the user's modules, and remarks."""
    if ranks is not None:
        yield from map(loaded.source.render, check_start(loaded.experiment, *ranks))
    if "own parts" in changes:
        yield from map(loaded.source.render, missing_parts([loaded.experiment], lambda: None))
    if "plan" in changes or "plan here" in changes:
        try:
            make_plan(loaded, on_this_machine="plan here" in changes)
        except BadFileError as error:
            yield from error.problems
    if "remarks" in changes:
        yield from map(loaded.source.render, remarks(loaded.experiment))


def main() -> None:
    """Write the golden files again."""
    for golden in (GOLDEN, NEWCOMERS):
        rows: list[str] = []
        for case in cases(golden):
            rows += [case, *(lines_of(case) if case.startswith(">") else [])]
        golden.write_text("\n".join(rows) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    main()
