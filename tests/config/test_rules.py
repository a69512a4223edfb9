from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config import names
from hpc_train.config.loading import load
from hpc_train.config.rules import check_start
from hpc_train.config.slurm_rules import HAVE_A_KEY, OWNED

from .files import GOOD, problems_of

IMAGES = "data.image_size=32"
CROP = "data.augment.random_resized_crop={}"


def args(*overrides: str) -> tuple[str, ...]:
    return overrides


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (args("optimization.steps=5"), "optimization.steps", "beside optimization.epochs; keep one"),
        (args("optimization.epochs="), "optimization.epochs", "is missing, and so is optimization.steps"),
        (args("optimization.global_batch_size=8"), "optimization.global_batch_size", "write 16, or"),
        (args("checkpoint={every_min: 1, every_steps: 1}"), "checkpoint.every_steps", "keep one"),
        (args("evaluation={every_epochs: 1, every_steps: 1}"), "evaluation.every_steps", "keep one"),
        (
            args("optimization.schedule={warmup_epochs: 1, warmup_steps: 1}"),
            "optimization.schedule.warmup_steps",
            "keep one",
        ),
        (
            args("optimization.schedule.warmup_epochs=3"),
            "optimization.schedule.warmup_epochs",
            "3 is not shorter than the run of 3 epochs; write less than 3",
        ),
        (
            args("optimization.epochs=", "optimization.steps=9", "optimization.schedule.warmup_steps=10"),
            "optimization.schedule.warmup_steps",
            "write less than 9",
        ),
        (args("slurm={nodes: 5}"), "slurm.nodes", "4 micro-batches"),
        (args("slurm={nodes: 3-9, gpus_per_node: 2}"), "slurm.nodes", "ask for at most 4 ranks"),
        (args("slurm={nodes: 4-2}"), "slurm.nodes", "write 2-4"),
        (args("slurm.gpu_type=a100"), "slurm.gpu_type", "write slurm.gpus_per_node"),
        (args("slurm={gpus_per_node: 1, ranks_per_node: 2}"), "slurm.ranks_per_node", "write 1, or take"),
        (
            args("slurm={gpus_per_node: 3, ranks_per_node: 2, cpus_per_gpu: 1}"),
            "slurm.cpus_per_gpu",
            "3 GPUs of 1 cores have 3, which 2 ranks can't share evenly; write a number",
        ),
        (
            args("slurm={time_limit: 2min, signal_lead_s: 120}"),
            "slurm.signal_lead_s",
            "120 s is not below slurm.time_limit of 120 s; write less than 120",
        ),
        (
            args("compile.fullgraph=true", "parallel.sync_batchnorm=true"),
            "compile.fullgraph",
            "breaks the graph; write false",
        ),
        (args("model.channels_last=true", "parallel.strategy=fsdp"), "model.channels_last", "strategy: ddp"),
        (
            args("parallel={strategy: pipeline, sync_batchnorm: true}"),
            "parallel.sync_batchnorm",
            "can't be true under pipeline, whose ranks don't all have each layer; write false",
        ),
        (args(CROP), "data.augment.random_resized_crop", "write data.image_size"),
        (args(IMAGES, CROP, "data.augment.crop_padding=4"), "data.augment.crop_padding", "beside"),
        (
            args(IMAGES, "data.augment.random_resized_crop={scale: [1, 0.1]}"),
            "data.augment.random_resized_crop.scale",
            "write [0.1, 1]",
        ),
        (args("data.normalize={mean: [0.5], std: [1, 1]}"), "data.normalize.std", "one a channel"),
        (args("data.normalize={mean: [], std: []}"), "data.normalize.mean", "is empty"),
        (args('data.root="a\\nb"'), "data.root", "control character"),
        (args('data.root="a\\0b"'), "data.root", "control character"),
        (args("data.root=''"), "data.root", "is empty"),
        (args('model.pretrained="\\e.pth"'), "model.pretrained", "control character"),
        (args("model.pretrained=weights.bin"), "model.pretrained", ".safetensors or .pth"),
        (args('environment.python="/a b"'), "environment.python", "a path without blanks"),
        (args("data.name=imagefolder"), "data.root", "imagefolder needs it"),
        (args("data.name=digit"), "data.name", "did you mean digits?"),
        (args("data.name=torchvision", "data.root=x"), "data.name", "write torchvision/CIFAR10"),
        (args("data.name=digits/8"), "data.name", "write digits"),
        (args("model.name=resnet50"), "model.name", "write timm/resnet50"),
        (args("model.name=tim/resnet50"), "model.name", "did you mean timm?"),
        (args("model.name=timm"), "model.name", "write timm/resnet50"),
        (args("task=clasification"), "task", "did you mean classification?"),
        (args("parallel.strategy=dpp"), "parallel.strategy", "did you mean ddp?"),
        (args("logging.loggers.tensorbord={}"), "logging.loggers.tensorbord", "no logger"),
        (args("logging.loggers.wandb={}"), "logging.loggers.wandb", "write logging.wandb"),
        (args("optimization.optimizer.args.lr=1"), "optimization.optimizer.args.lr", "optimizer.lr"),
        (args("model.args.pretrained=true"), "model.args.pretrained", "write model.pretrained"),
        (args("model.args.drop-path=1"), "model.args.drop-path", "Python name"),
        (args("data.args={'a b': 1}"), "data.args.a b", "Python name"),
        (args("parallel.shard=2"), "parallel.shard", "belongs to fsdp"),
        (args("parallel={strategy: fsdp, shard: 3}", "slurm.nodes=4"), "parallel.shard", "divides 4"),
        (args("slurm.extra.nice=false"), "slurm.extra.nice", "true sets the option"),
        (args("slurm.extra.comment='a b'"), "slurm.extra.comment", "one word"),
        (args("slurm.extra.comment='$(id)'"), "slurm.extra.comment", "one word"),
        (args('slurm.extra.comment="a\\n"'), "slurm.extra.comment", "one word"),
        (args("sweep.grid={optimizer.lr: [1]}"), "sweep.grid.optimizer.lr", "mean optimization.optimizer?"),
        (args("sweep.grid={name: [a, b]}"), "sweep.grid.name", "out of the grid"),
        (args("sweep.grid={slurm.nodes: [1]}"), "sweep.grid.slurm.nodes", "out of the grid"),
        (args("sweep.grid={data.root: [a]}"), "sweep.grid.data.root", "out of the grid"),
        (args("sweep.grid={seed: [1, 2, 1]}"), "sweep.grid.seed[2]", "the same as value 1"),
        (args("sweep.grid={optimization.epochs: [1, x]}"), "sweep.grid.optimization.epochs[1]", "number"),
        (args("sweep.grid={seed: []}"), "sweep.grid.seed", "at least one value"),
        (
            args("sweep.grid={" + ", ".join(f"model.args.k{n}: [1]" for n in range(101)) + "}"),
            "sweep.grid",
            "has 101 keys; write at most 100",
        ),
        (
            args("sweep.grid={optimization.optimizer: [{name: sgd, lr: 1, lrr: 2}]}"),
            "sweep.grid.optimization.optimizer[0].lrr",
            "no key of the file",
        ),
        (
            args("sweep.grid={optimization.optimizer: [{name: a, lr: 1}], optimization.optimizer.lr: [1]}"),
            "sweep.grid.optimization.optimizer.lr",
            "sweep one of the two",
        ),
        (
            args(f"sweep.grid={{seed: {list(range(101))}, data.args.a: {list(range(100))}}}"),
            "sweep.grid",
            "makes 10,100 runs; write at most 10,000",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], key: str, said: str
) -> None:
    lines = problems_of(tmp_path, GOOD, *overrides)
    assert len(lines) == 1, lines
    assert f": {key}: " in lines[0] and said in lines[0]


@pytest.mark.parametrize("option", OWNED)
def test_slurm_options_of_the_launcher_are_refused(tmp_path: Path, option: str) -> None:
    for written in (option, option.replace("-", "_"), option[:-1]):
        (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{written}=x")
        assert "belongs to hpc-train" in line or "has a key of its own" in line


@pytest.mark.parametrize("option", sorted(set(HAVE_A_KEY) - {"gres"}))
def test_slurm_options_with_a_key_name_it(tmp_path: Path, option: str) -> None:
    (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{option}=1")
    assert f"write {HAVE_A_KEY[option]}" in line


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.root=../data",),
        ("slurm.extra={gres: 'lscratch:100', exclusive: true, nice: 5, licenses: 'a@b:1'}",),
        ("slurm={nodes: 4}",),
        ("slurm={nodes: 4-99}",),
        ("slurm={gpus_per_node: 1, ranks_per_node: 2}", "device=cpu"),
        ("slurm={gpus_per_node: 4, ranks_per_node: 2, cpus_per_gpu: 3, gpu_type: a100}",),
        ("slurm={time_limit: 2min, signal_lead_s: 119}",),
        ("slurm={signal_lead_s: 300}",),
        ("slurm={dependency: 'afterok:1?afterany:2_3', exclude: 'n[1-3]', constraint: 'a|b'}",),
        ("precision=tf32", "device=cpu"),
        ("optimization.schedule.warmup_steps=99999",),
        ("model.args.num_classes=7",),
        ("sweep.grid={seed: [1, 2], optimization.clip_grad_norm: [null, 1.0], data.args.x: [1, '1', true]}",),
        ("parallel={strategy: hsdp, shard: 2, replicate: 2}", "slurm.nodes=4"),
        ("data.name=acme:data",),
        (CROP, IMAGES),
    ],
)
def test_sound_files_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert problems_of(tmp_path, GOOD, *overrides) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimization.mixup=0.2", "optimization.mixup"),
        ("optimization.cutmix=1", "optimization.cutmix"),
        ("optimization.micro_batch_size=auto", "optimization.micro_batch_size"),
        ("parallel.strategy=tensor", "parallel.strategy"),
    ],
)
def test_what_can_not_be_started_yet_is_named(tmp_path: Path, override: str, key: str) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    (problem,) = check_start(load(path, [override]).experiment, ranks=None)
    assert ".".join(map(str, problem.path)) == key
    assert "does not work in this version" in problem.message


def test_each_number_of_nodes_of_a_range_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD.replace("global_batch_size: 64", "global_batch_size: 256"))
    experiment = load(path, ["parallel={strategy: hsdp, shard: 4}"]).experiment
    assert check_start(experiment, 8, ranks_per_node=2) == []
    (problem,) = check_start(experiment, 8, ranks_per_node=2, fewest_ranks=4)
    assert problem.path == ("parallel", "shard") and "there are 6" in problem.message
    assert check_start(experiment, 16, ranks_per_node=4, fewest_ranks=4) == []


def test_more_ranks_than_micro_batches_are_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    experiment = load(path).experiment
    assert check_start(experiment, 4) == []
    (problem,) = check_start(experiment, 5)
    assert "at most 4 ranks" in problem.message


def test_batchnorm_over_ranks_that_do_not_share_micro_batches_evenly_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    experiment = load(path, ["parallel.sync_batchnorm=true"]).experiment
    assert [check_start(experiment, ranks) for ranks in (None, 1, 2, 4)] == [[], [], [], []]
    (problem,) = check_start(experiment, 3)
    assert problem.path == ("parallel", "sync_batchnorm")
    assert "divides 4 micro-batches, got 3" in problem.message and problem.remedy.startswith("start 2")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A child that knows two models, one with BatchNorm."""
    answer: dict[str, Any] = {
        "timm": ["resnet50", "vit_tiny"],
        "torchvision": ["resnet18"],
        "datasets": ["CIFAR10"],
    }
    child = tmp_path / "python"
    child.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*resnet*) echo '{\"has_batchnorm\": true}' ;;\n"
        "*--batchnorm*) echo '{\"has_batchnorm\": false}' ;;\n"
        f"*) echo '{json.dumps(answer)}' ;;\nesac\n"
    )
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    names.forget_answers()
    yield
    names.forget_answers()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.name=timm/resnet5",), "timm has no model 'resnet5'; did you mean timm/resnet50?"),
        (("model.name=timm/ResNet50.a1",), "did you mean timm/resnet50?"),
        (("model.name=torchvision/resnet50",), "did you mean torchvision/resnet18?"),
        (("data.name=torchvision/cifar10", "data.root=x"), "torchvision has no data set"),
        (
            ("model.name=timm/resnet50", "parallel.strategy=fsdp", "precision=bf16"),
            "which has BatchNorm; write fp32, or parallel.strategy: ddp",
        ),
    ],
)
def test_names_are_checked_against_the_childs_list(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    (line,) = problems_of(tmp_path, GOOD, *overrides)
    assert said in line


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.name=timm/resnet50.a1_in1k",),
        ("model.name=timm/resnet50", "parallel.strategy=fsdp"),
        ("model.name=timm/vit_tiny", "parallel.strategy=fsdp", "precision=bf16"),
        ("data.name=torchvision/CIFAR10", "data.root=x"),
    ],
)
def test_listed_names_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert problems_of(tmp_path, GOOD, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("compile={mode: reduce-overhead}", "parallel.strategy=fsdp"), "compile.mode"),
        (("compile={mode: max-autotune}", "parallel.strategy=zero2"), "compile.mode"),
        (
            ("optimization.optimizer={name: adafactor, lr: 0.1}", "parallel.strategy=fsdp"),
            "optimization.optimizer.name",
        ),
        (
            ("optimization.optimizer={name: timm/sgdp, lr: 0.1}", "parallel.strategy=zero1"),
            "optimization.optimizer.name",
        ),
        (("compile={fallback: true, fullgraph: true}",), "compile.fallback"),
    ],
)
def test_what_compile_can_not_be_combined_with_is_named(
    tmp_path: Path, overrides: tuple[str, ...], key: str
) -> None:
    (problem,) = problems_of(tmp_path, GOOD, *overrides)
    assert f": {key}: " in problem
    allowed = ["compile={mode: reduce-overhead}", "compile={fallback: true}", "compile.mode=max-autotune"]
    for override in allowed:
        assert problems_of(tmp_path, GOOD, override) == []
