"""What the file check and the ranks both find wrong, they report in the same words.

A rule that ranks apply too is a function that returns a ``Problem``, which they raise by ``as_error``: each
such call in the package has a row in ``SHARED``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import timm.optim
import torch
import torchvision
import yaml
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.keys import replaced, split_key
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.rules import check_start
from hpc_train.registry import load as load_part
from hpc_train.training import batch_size_search, optimization, prepare, rank, verification
from hpc_train.training.datasets import batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.joint import JointTransform
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.models import segmentation_models
from hpc_train.training.models.building import build_model
from hpc_train.training.models.torchvision import model_names
from hpc_train.training.optimization import make_schedule
from hpc_train.training.strategies import batchnorm
from hpc_train.training.strategies import model_facts as facts_of_models
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.fully_sharded import refuse_unshardable
from hpc_train.training.strategies.pipeline import PipelineStrategy
from hpc_train.training.strategies.tensor import refuse_unshared
from tests.config.files import GOOD

PACKAGE = Path(model_facts.__file__).parents[2]
CPU = torch.device("cpu")
IMAGES = DataInfo(num_classes=10, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
BATCHNORM = "acme.models:normalized"
VIT = "timm/vit_tiny_patch16_224"
MASKS = {"name": "segmentation_folder", "root": "/data", "args": {"num_classes": 2}}
SEGMENTER = {"task": "segmentation", "data": MASKS}
FEW = {"data": {"name": "synthetic", "args": {"num_samples": 40}}}
TEXT = {"name": "text", "root": "/data", "args": {"sequence_length": 8}}


@dataclass(frozen=True)
class Shared:
    """A rule that ranks apply too."""

    #: Keys of the file → values that break the rule.
    changes: dict[str, Any]
    #: What a rank does with such an experiment.
    at_rank: Callable[[Experiment], object]
    #: The number of ranks, where the rule depends on it.
    ranks: int | None = None
    #: What ``micro_batch_size: auto`` found.
    found: int | None = None
    #: What a rank says in place of a name that it does not know, and that name.
    unnamed: tuple[str, str] = ("", "")

    def experiment(self) -> Experiment:
        data = yaml.safe_load(GOOD)
        for key, value in self.changes.items():
            data = replaced(data, split_key(key), value)
        return Experiment.model_validate(data)


def context(experiment: Experiment, degrees: Degrees | None = None) -> RankContext:
    precision = choose_precision("fp32", CPU)
    return RankContext(0, degrees or Degrees(), CPU, precision, parallel=experiment.parallel)


def build(experiment: Experiment) -> nn.Module:
    with torch.device("meta"):
        return build_model(experiment.model, IMAGES)


def read(experiment: Experiment) -> object:
    return build_source(experiment.data)


def sample(num_samples: int, ranks: int = 1) -> Callable[[Experiment], object]:
    def at_rank(experiment: Experiment) -> object:
        sizes = experiment.optimization.global_batch_size, experiment.optimization.micro_batch_size
        assert sizes[1] != "auto"
        return MicroBatchSampler(
            num_samples,
            global_batch_size=sizes[0],
            micro_batch_size=sizes[1],
            seed=0,
            repeats=experiment.data.augment.repeats,
            position=Position(0),
            total_steps=1,
            world_size=ranks,
        )

    return at_rank


def compute(num_samples: int, ranks: int = 1) -> Callable[[Experiment], object]:
    return lambda experiment: BatchArithmetic.of(experiment.optimization, num_samples, ranks)


def refuse_compiled(experiment: Experiment) -> None:
    model = nn.Linear(1, 1)
    model.compile()
    PipelineStrategy(context(experiment)).place(model, [])


def schedule_slots(slots: int) -> Callable[[Experiment], object]:
    batch = cast(Any, SimpleNamespace(inputs=torch.zeros(1)))

    def at_rank(experiment: Experiment) -> object:
        strategy = PipelineStrategy(context(experiment, Degrees(pipeline=2)))
        return strategy._run_for([batch] * slots, cast(Any, None))

    return at_rank


def find_found(size: int, ranks: int) -> Callable[[Experiment], object]:
    def at_rank(experiment: Experiment) -> None:
        here = SimpleNamespace(experiment=experiment, degrees=Degrees(replicate=ranks))
        batch_size_search._check_ranks(cast(Any, here), size)

    return at_rank


def shard_batchnorm(experiment: Experiment) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    refuse_unshardable(model, [], choose_precision("bf16", CPU), experiment.parallel.strategy)


def optimize(experiment: Experiment) -> object:
    return optimization.make_optimizer(experiment.optimization.optimizer, {}, 64)


def schedule(experiment: Experiment) -> object:
    return make_schedule(experiment.optimization.schedule, experiment.optimization.steps or 9, 3)


def start_on(ranks: int) -> Callable[[Experiment], object]:
    facts = cast(Any, SimpleNamespace(world_size=ranks, num_nodes=1))
    return lambda experiment: rank._degrees(experiment, facts)


#: ``module.function: rule``, where a rank raises what the rule returns. A function may have several rules.
SHARED = {
    "training.datasets.base.refuse_rest: rest_not_taken": Shared({"data.name": "digits/x"}, read),
    "training.datasets.batches._square: only_for_masks": Shared(
        {"data.image_size": [32, 64]}, lambda experiment: batches._square(experiment.data, None)
    ),
    "training.datasets.building.build_source: missing_root": Shared({"data": {"name": "imagefolder"}}, read),
    "training.datasets.joint.__init__: not_for_masks": Shared(
        {"task": "segmentation", "data": MASKS | {"augment": {"crop_padding": 4}}},
        lambda experiment: JointTransform(experiment.data, 0, None, is_training=True),
    ),
    "training.datasets.normalize._check_length: normalize_problem": Shared(
        {"data.normalize": {"mean": [0.5], "std": [0.5]}, "data.args": {"channels": 3}},
        lambda experiment: Normalize(IMAGES, experiment.data),
    ),
    "training.datasets.sampler._check_sizes: too_few_micro_batches": Shared(
        {}, sample(10**6, ranks=5), ranks=5
    ),
    "training.datasets.sampler._check_sizes: too_few_samples": Shared(FEW, sample(40)),
    "training.datasets.sampler._check_sizes: undivided_batch": Shared(
        {"optimization.micro_batch_size": 24}, sample(10**6)
    ),
    "training.datasets.sampler._check_sizes: undivided_repeats": Shared(
        {"data": {"name": "digits", "augment": {"repeats": 3}}}, sample(10**6)
    ),
    "training.datasets.sources.torchvision._class: unlisted": Shared(
        {"data": {"name": "torchvision/CIFAR11", "root": "/data"}}, read
    ),
    "training.distributed.device._refuse_without_float8: no_float8": Shared(
        {"precision": "fp8", "device": "cpu"}, lambda experiment: choose_precision("fp8", CPU)
    ),
    "training.models.gpt.build: gpt_args_problems": Shared(
        {"model": {"name": "gpt", "args": {"num_heads": 3}}, "data": TEXT, "task": "causal_lm"},
        lambda experiment: build_model(experiment.model, replace(IMAGES, sequence_length=8)),
    ),
    "training.models.gpt.build: needs_tokens": Shared(
        {"model.name": "gpt"}, build, unnamed=("this data set", "digits")
    ),
    "training.models.gpt.build: rest_not_taken": Shared(
        {"model.name": "gpt/small", "data": TEXT, "task": "causal_lm"}, build
    ),
    "training.models.segmentation_models._class_and_encoder: encoder_problem": Shared(
        SEGMENTER | {"model": {"name": "smp/unet", "args": {"encoder_name": "resnet19"}}}, build
    ),
    "training.models.segmentation_models._class_and_encoder: owned_arguments": Shared(
        SEGMENTER | {"model": {"name": "smp/unet", "args": {"encoder_weights": "imagenet"}}}, build
    ),
    "training.models.segmentation_models._class_and_encoder: unlisted": Shared(
        SEGMENTER | {"model.name": "smp/unit"}, build
    ),
    "training.models.timm.build: not_an_argument": Shared(
        {"model": {"name": VIT, "args": {"pretrained": True}}}, build
    ),
    "training.models.timm._refuse_unknown: unlisted": Shared({"model.name": "timm/resnet19"}, build),
    "training.models.torchvision._arguments: not_an_argument": Shared(
        {"model": {"name": "torchvision/resnet18", "args": {"weights": "DEFAULT"}}}, build
    ),
    "training.models.torchvision.build: unlisted": Shared({"model.name": "torchvision/resnet19"}, build),
    "training.models.torchvision.build: model_problem": Shared(
        {
            "model.name": "torchvision/resnet18",
            "data": {"name": "synthetic", "args": {"channels": 2, "num_samples": 640}},
        },
        lambda experiment: build_model(experiment.model, replace(IMAGES, channels=2)),
    ),
    "training.strategies.base.check_args: problems_of_arguments": Shared(
        {"parallel": {"strategy": "ddp", "args": {"bucket_cap_mb": 9}}},
        lambda experiment: context(experiment).check_args("ddp"),
    ),
    "training.strategies.fully_sharded.refuse_unshardable: sharded_batchnorm": Shared(
        {"model.name": "timm/resnet18", "precision": "bf16", "parallel": {"strategy": "fsdp"}},
        shard_batchnorm,
        unnamed=("this model", "timm/resnet18"),
    ),
    "training.strategies.pipeline.__init__: problem_of_stages": Shared(
        {"parallel": {"strategy": "pipeline", "stages_per_rank": 2}},
        lambda experiment: PipelineStrategy(context(experiment)),
    ),
    "training.strategies.pipeline.place: compiled_whole": Shared(
        {"parallel": {"strategy": "pipeline"}, "compile": {"scope": "model"}}, refuse_compiled
    ),
    "training.strategies.pipeline._run_for: problem": Shared(
        {
            "parallel": {"strategy": "pipeline", "schedule": "interleaved"},
            "optimization.global_batch_size": 80,
        },
        schedule_slots(5),
        ranks=2,
    ),
    "training.strategies.batchnorm.sync_batchnorm: uneven_sync_batchnorm": Shared(
        {"parallel": {"sync_batchnorm": True}},
        lambda experiment: batchnorm.sync_batchnorm(nn.Identity(), CPU, experiment.micro_batches),
        ranks=3,
    ),
    "training.strategies.tensor._check: dropped_attention": Shared(
        {
            "model": {"name": VIT, "args": {"attn_drop_rate": 0.1}},
            "parallel": {"strategy": "tensor", "tensor": 3},
        },
        lambda experiment: refuse_unshared(build(experiment), 3, ""),
    ),
    "training.strategies.tensor._check: uneven_share": Shared(
        {"model.name": VIT, "parallel": {"strategy": "tensor", "tensor": 2}},
        lambda experiment: refuse_unshared(build(experiment), 2, ""),
    ),
    "experiment.topology.batch_arithmetic.of: too_few_micro_batches": Shared(
        {}, compute(10**6, ranks=5), ranks=5
    ),
    "experiment.topology.batch_arithmetic.of: too_few_samples": Shared(FEW, compute(40)),
    "training.batch_size_search._check_ranks: too_few_micro_batches": Shared(
        {"optimization.micro_batch_size": "auto"}, find_found(32, ranks=3), ranks=3, found=32
    ),
    "training.batch_size_search._search: auto_on_cpu": Shared(
        {"optimization.micro_batch_size": "auto", "device": "cpu"},
        lambda experiment: batch_size_search._search(
            cast(Any, SimpleNamespace(experiment=experiment, device=CPU)), cast(Any, None)
        ),
    ),
    "training.batch_size_search._refuse_batchnorm: auto_batchnorm": Shared(
        {"optimization.micro_batch_size": "auto", "model.name": BATCHNORM},
        lambda experiment: batch_size_search._refuse_batchnorm(
            experiment, cast(Any, SimpleNamespace(model=nn.BatchNorm1d(1)))
        ),
    ),
    "training.verification.refuse_inexact: unverifiable_results": Shared(
        {"recovery": {"verify_every_steps": 5}, "deterministic": False},
        lambda experiment: verification.refuse_inexact(experiment, CPU),
    ),
    "training.optimization._arguments: not_an_argument": Shared(
        {"optimization.optimizer": {"name": "sgd", "lr": 0.1, "args": {"momentum": 0.9}}}, optimize
    ),
    "training.optimization._arguments: lacking_arguments": Shared(
        {"optimization.optimizer": {"name": "adamw", "lr": 0.1, "momentum": 0.9}}, optimize
    ),
    "training.optimization._find: problem_of_optimizer": Shared(
        {"optimization.optimizer": {"name": "adamx", "lr": 0.1}}, optimize
    ),
    "training.optimization.make_optimizer: unfit_fused_sgd": Shared(
        {"precision": "fp16", "optimization.optimizer": {"name": "sgd", "lr": 0.1, "args": {"fused": True}}},
        lambda experiment: optimization.make_optimizer(
            experiment.optimization.optimizer, {}, 1, may_fuse=False
        ),
    ),
    "training.prepare._arithmetic: too_few_samples": Shared(
        FEW, lambda experiment: prepare._arithmetic(experiment, build_source(experiment.data))
    ),
    "training.rank._degrees: find_degrees": Shared(
        {"parallel": {"strategy": "fsdp", "shard": 3}}, start_on(4), ranks=4
    ),
    "training.optimization.make_schedule: too_long_warmup": Shared(
        {"optimization.epochs": None, "optimization.steps": 9, "optimization.schedule": {"warmup_steps": 10}},
        schedule,
    ),
    "training.optimization.make_schedule: problem_of_schedule_name": Shared(
        {"optimization.schedule": {"name": "cosin"}}, schedule
    ),
    # Ranks need no Problem for these: the registry raises the error of a part that does not exist.
    "registry.load: strategies": Shared(
        {"parallel": {"strategy": "fsdpp"}},
        lambda experiment: load_part("strategies", experiment.parallel.strategy),
    ),
    "registry.load: tasks": Shared(
        {"task": "classify"},
        lambda experiment: load_part("tasks", experiment.task),
        unnamed=("did you mean classification?", "write classification"),
    ),
    "registry.load: models": Shared(
        {"model.name": "tim/resnet18"}, build, unnamed=("did you mean timm?", "write timm/resnet18")
    ),
    "registry.load: datasets": Shared(
        {"data.name": "imagefolders"}, read, unnamed=("did you mean imagefolder?", "write imagefolder")
    ),
}
#: What commands check of the data, beside the file: shown to be the same by tests/data_facts.
OF_THE_DATA = {"misplaced"}
#: Rules of ranks alone: which arguments a part takes is known once it is imported.
OF_RANKS_ALONE = {"unknown_argument"}


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer without a child process what the file check asks about models."""
    names = {
        "timm": timm.list_models(),
        "torchvision": model_names(),
        "datasets": sorted(torchvision.datasets.__all__),
        "smp": segmentation_models.architectures(),
        "smp_encoders": segmentation_models.encoders(),
        "timm_optimizers": timm.optim.list_optimizers(),
    }
    monkeypatch.setattr(model_facts, "known_names", names.get)
    monkeypatch.setattr(model_facts, "facts", _facts)


def _facts(name: str, args: dict[str, Any], image_size: int | None = None) -> dict[str, Any]:
    if name == BATCHNORM:
        return {"has_batchnorm": True}
    known = {VIT, "timm/resnet18", "torchvision/resnet18"}
    is_known = name in known and not {"pretrained", "weights"} & args.keys()
    return facts_of_models.facts(name, args) if is_known else {}


def words_of_the_file(shared: Shared, folder: Path) -> str:
    """Return the first problem that ``validate`` reports, without its position."""
    path = folder / "exp.yaml"
    path.write_text(GOOD)
    changes = [f"{key}={json.dumps(value)}" for key, value in shared.changes.items()]
    try:
        loaded = load(path, changes)
        make_plan(loaded)
    except BadFileError as error:
        return re.sub(r"^(command line|\S+:\d+:\d+): ", "", error.problems[0])
    problems = check_start(loaded.experiment, shared.ranks, found=shared.found)
    return str(problems[0].as_error()) if problems else "nothing"


@pytest.mark.parametrize("rule", SHARED)
def test_file_check_and_ranks_report_the_same_words(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SHARED[rule]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: shared.ranks is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: shared.ranks or 1)
    file = words_of_the_file(shared, tmp_path)
    with pytest.raises(BadFileError) as caught:
        shared.at_rank(shared.experiment())
    assert str(caught.value).replace(*shared.unnamed) == file


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def called_in(function: ast.FunctionDef) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def test_each_rule_that_ranks_apply_too_has_a_row() -> None:
    files = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")
    }
    rules = {
        function.name
        for path in files.values()
        for function in functions(path)
        if function.returns is not None and "Problem" in ast.unparse(function.returns)
    }
    raised: dict[str, set[str]] = {
        f"{module}.{function.name}": called & rules
        for module, path in files.items()
        for function in functions(path)
        if "as_error" in (called := called_in(function)) and function.name != "as_error"
    }
    assert all(raised.values()), "a function of its own returns the Problem"
    exempt = OF_RANKS_ALONE | OF_THE_DATA
    found = {f"{where}: {rule}" for where, some in raised.items() for rule in some - exempt}
    assert found == {row for row in SHARED if not row.startswith("registry.")}
    checked = [
        called_in(function)
        for path in (PACKAGE / "experiment" / "validate").glob("*.py")
        for function in functions(path)
    ]
    assert not OF_RANKS_ALONE & set().union(*checked)
