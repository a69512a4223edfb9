from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.problems import dotted
from hpc_train.config.schema import Experiment
from hpc_train.registry import parts
from hpc_train.validate import logging_rules, model_facts, part_rules
from hpc_train.validate.loading import load
from hpc_train.validate.rules import check_start
from hpc_train.validate.slurm_rules import MEMORY_SHARES, OWNED, SBATCH_KEYS
from tests.config.files import GOOD, problems_of

IMAGES = "data.image_size=32"
MASKS = ("task=segmentation", "data={name: segmentation_folder, root: x, args: {num_classes: 2}}")
CROP = "data.augment.random_resized_crop={}"

LORA = "model.lora={rank: 2, targets: ['*']}"


def args(*overrides: str) -> tuple[str, ...]:
    return overrides


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            args("optimization.steps=5"),
            "optimization.steps",
            "can't be combined with optimization.epochs; keep one",
        ),
        (args("optimization.epochs="), "optimization.epochs", "is missing, and so is optimization.steps"),
        (args("optimization.global_batch_size=8"), "optimization.global_batch_size", "write 16, or"),
        (args("checkpoint={every_min: 1, every_steps: 1}"), "checkpoint.every_steps", "keep one"),
        (
            args("checkpoint.best={metric: ema_accuracy, mode: max}"),
            "checkpoint.best.metric",
            "write accuracy, or add optimization.ema",
        ),
        (
            args("early_stopping={metric: ema_loss, mode: min, patience: 2}"),
            "early_stopping.metric",
            "write loss, or add optimization.ema",
        ),
        (
            args("early_stopping={metric: loss, mode: min}"),
            "early_stopping.patience",
            "write patience: 5, or median_after: 3",
        ),
        (
            args("checkpoint.best={metric: f1_macro, mode: max}"),
            "checkpoint.best.metric",
            "f1_macro is not a metric of classification (target: class); write one of loss, accuracy",
        ),
        (
            args(
                "early_stopping={metric: map_multilabel, mode: max, patience: 3}",
                "data={name: image_list, root: x}",
            ),
            "early_stopping.metric",
            "map_multilabel is not a metric of classification (target: class)",
        ),
        (
            args(
                "checkpoint.best={metric: f1_micro, mode: max}",
                "data={name: image_list, root: x, args: {target: classes}}",
                "optimization.loss={name: cross_entropy}",
            ),
            "checkpoint.best.metric",
            "f1_micro is not a metric of classification (target: class)",
        ),
        (
            args("checkpoint.best={metric: acuracy, mode: max}"),
            "checkpoint.best.metric",
            "did you mean accuracy?",
        ),
        (
            args(*MASKS, "early_stopping={metric: bleu, mode: max, patience: 2}"),
            "early_stopping.metric",
            "write one of loss, accuracy, miou, iou_<class>",
        ),
        (args("evaluation={every_epochs: 1, every_steps: 1}"), "evaluation.every_steps", "keep one"),
        (
            args("optimization.schedule={warmup_epochs: 1, warmup_steps: 1}"),
            "optimization.schedule.warmup_steps",
            "keep one",
        ),
        (
            args("optimization.schedule.warmup_epochs=3"),
            "optimization.schedule.warmup_epochs",
            "a warm-up of 3 epochs is not shorter than the run, which has 3; write a shorter one",
        ),
        (
            args("optimization.epochs=", "optimization.steps=9", "optimization.schedule.warmup_steps=10"),
            "optimization.schedule.warmup_steps",
            "a warm-up of 10 steps is not shorter than the run, which has 9",
        ),
        (args("slurm={nodes: 5}"), "slurm.nodes", "4 micro-batches"),
        (args("slurm={nodes: 3-9, gpus_per_node: 2}"), "slurm.nodes", "ask for at most 4 ranks"),
        (args("slurm={nodes: 2-5}"), "slurm.nodes", "5 nodes of 1 ranks make 5 ranks"),
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
        (args(LORA, "parallel.strategy=tensor"), "model.lora", "write parallel.strategy: fsdp"),
        (args(LORA, "parallel={strategy: pipeline, tensor: 2}"), "model.lora", "strategy: fsdp"),
        (args(LORA, "precision=fp8"), "precision", "write bf16"),
        (args("model.init_from=w.pth", "model.pretrained=true"), "model.init_from", "take one of them out"),
        (args('model.init_from=""'), "model.init_from", "write a path, or take the key out"),
        (args("model.channels_last=true", "parallel.strategy=split"), "model.channels_last", "strategy: ddp"),
        (
            args("parallel={strategy: pipeline, sync_batchnorm: true}"),
            "parallel.sync_batchnorm",
            "can't be true under pipeline, whose ranks have only some of the layers; write false",
        ),
        (args(CROP), "data.augment.random_resized_crop", "write data.image_size"),
        (
            args(IMAGES, CROP, "data.augment.crop_padding=4"),
            "data.augment.crop_padding",
            "be combined with random_resized_crop",
        ),
        (
            args(IMAGES, "data.augment.random_resized_crop={scale: [1, 0.1]}"),
            "data.augment.random_resized_crop.scale",
            "write [0.1, 1]",
        ),
        (args(*MASKS, "data.augment.random_scale=[2, 1]"), "data.augment.random_scale", "write [1, 2]"),
        (
            args(*MASKS, IMAGES, CROP, "data.augment.random_scale=[1, 2]"),
            "data.augment.random_scale",
            "be combined with random_resized_crop",
        ),
        (
            args(*MASKS, "data.augment.randaugment={}"),
            "data.augment.randaugment",
            "write random_scale, hflip",
        ),
        (args(*MASKS, "data.eval_crop=0.5"), "data.eval_crop", "whole images are evaluated"),
        (args("data.augment.random_scale=[1, 2]"), "data.augment.random_scale", "is for images with masks"),
        (
            args("data.augment.repeats=3"),
            "data.augment.repeats",
            "3 does not divide optimization.global_batch_size 64; write 2,",
        ),
        (
            args("data.augment.randaugment={operations: timm, magnitude: 12}"),
            "data.augment.randaugment.magnitude",
            "write 9",
        ),
        (args("data.eval_size=64"), "data.eval_size", "is for images with masks or boxes; take it out"),
        (args("data.image_size=[64, 32]"), "data.image_size", "resized to squares; write 64"),
        (args("data.normalize={mean: [0.5], std: [1, 1]}"), "data.normalize.std", "one value per channel"),
        (args("data.normalize={mean: [], std: []}"), "data.normalize.mean", "is empty"),
        (args("data.normalize={mean: [0.5]}"), "data.normalize.std", "one value per channel"),
        (args("data.normalize=weights"), "data.normalize", "only timm's, torchvision's and smp's do"),
        (
            args("data.normalize=weights", "model={name: timm/resnet18}"),
            "data.normalize",
            "write model.pretrained: true",
        ),
        (
            args("data.normalize={mean: [0.5], from_weights: true}"),
            "data.normalize",
            "in addition to from_weights",
        ),
        (
            args("data.augment={policy: trivialaugment, randaugment: {}}"),
            "data.augment.policy",
            "take one of the two out",
        ),
        (args("data.augment={policy: augmix}"), "data.augment.policy", "write one of"),
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
        (args("logging.loggers.mlfow={}"), "logging.loggers.mlfow", "no logger"),
        (args("logging.loggers.wandb={}"), "logging.loggers.wandb", "write logging.wandb: {…}"),
        (args("logging.loggers.csv={}"), "logging.loggers.csv", "write logging.csv: true"),
        (args("optimization.optimizer.args.lr=1"), "optimization.optimizer.args.lr", "optimizer.lr"),
        (args("model.args.pretrained=true"), "model.args.pretrained", "write model.pretrained"),
        (args("model.args.drop-path=1"), "model.args.drop-path", "Python name"),
        (args("data.args={'a b': 1}"), "data.args.a b", "Python name"),
        (args("parallel.shard=2"), "parallel.shard", "belongs to fsdp"),
        (args("parallel={strategy: fsdp, shard: 3}", "slurm.nodes=4"), "parallel.shard", "divides 4"),
        (args("parallel={strategy: tensor, pipeline: 2}"), "parallel.pipeline", "belongs to pipeline, split"),
        (args("parallel.args.unused=1"), "parallel.args.unused", "write find_unused_parameters, or take it"),
        (
            args("parallel.args.find_unused_parameters='no'"),
            "parallel.args.find_unused_parameters",
            "needs true or false, got the text 'no'; write one of them, without quotes",
        ),
        (
            args("parallel={strategy: pipeline, args: {find_unused_parameters: true}}"),
            "parallel.args.find_unused_parameters",
            "does not apply to strategy pipeline; take it out",
        ),
        (
            args("parallel.schedule=gpipe"),
            "parallel.schedule",
            "gpipe does not apply to strategy ddp; take it",
        ),
        (args("parallel={strategy: split, schedule: gpipe}"), "parallel.schedule", "belongs to pipeline"),
        (args("parallel={strategy: tensor, stages_per_rank: 2}"), "parallel.stages_per_rank", "to pipeline"),
        (
            args("parallel={strategy: pipeline, stages_per_rank: 2}"),
            "parallel.stages_per_rank",
            "write schedule: interleaved",
        ),
        (
            args("parallel={strategy: pipeline, schedule: interleaved, stages_per_rank: 1}"),
            "parallel.stages_per_rank",
            "write 2, or schedule: 1f1b",
        ),
        (args("parallel={strategy: split, stages_per_rank: 2}"), "parallel.stages_per_rank", "take it out"),
        (args("slurm.extra.nice=false"), "slurm.extra.nice", "true sets the option"),
        (args("slurm.extra.comment='a b'"), "slurm.extra.comment", "one word"),
        (args("slurm.extra.comment='$(id)'"), "slurm.extra.comment", "one word"),
        (args('slurm.extra.comment="a\\n"'), "slurm.extra.comment", "one word"),
        (
            args("sweep.grid={optimizer.lr: [1]}"),
            "sweep.grid.optimizer.lr",
            "mean optimization.optimizer.lr?",
        ),
        (args("sweep.grid={name: [a, b]}"), "sweep.grid.name", "out of the grid"),
        (args("sweep.grid={slurm.partition: [a]}"), "sweep.grid.slurm.partition", "out of the grid"),
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
            "unknown key",
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
        assert "is set by hpc-train" in line or "has a key of its own" in line


@pytest.mark.parametrize("option", sorted(set(SBATCH_KEYS) - {"gres", *MEMORY_SHARES}))
def test_slurm_options_with_a_key_name_it(tmp_path: Path, option: str) -> None:
    (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{option}=1")
    assert f"write {SBATCH_KEYS[option]}" in line


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.root=../data",),
        ("slurm.extra={gres: 'lscratch:100', exclusive: true, nice: 5, licenses: 'a@b:1'}",),
        ("slurm={nodes: 4}",),
        ("slurm={nodes: 2-4}",),
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
        (
            "data={name: image_list, root: x, args: {target: classes}}",
            "checkpoint.best={metric: f1_macro, mode: max}",
        ),
        (CROP, IMAGES),
        ("parallel={strategy: pipeline, schedule: interleaved, stages_per_rank: 3}",),
        ("parallel={strategy: pipeline, pipeline: 2, tensor: 2, shard: 2, replicate: 2}",),
        ("parallel={strategy: split, shard: 1}", "compile=true"),
        ("parallel={strategy: tensor, tensor: 2}", "compile={scope: model}"),
        # Eight stages of one model have a micro-batch together.
        ("parallel={strategy: pipeline}", "slurm={nodes: 2, gpus_per_node: 4}"),
        ("parallel={strategy: tensor}", "slurm={nodes: 2, gpus_per_node: 4}"),
    ],
)
def test_sound_files_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert problems_of(tmp_path, GOOD, *overrides) == []


def test_each_number_of_nodes_of_a_range_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD.replace("global_batch_size: 64", "global_batch_size: 256"))
    experiment = load(path, ["parallel={strategy: hsdp, shard: 4}"]).experiment
    assert check_start(experiment, 8, ranks_per_node=2) == []
    (problem,) = check_start(experiment, 8, ranks_per_node=2, fewest_ranks=4)
    assert problem.path == ("parallel", "shard") and "there are 6" in problem.message
    assert check_start(experiment, 16, ranks_per_node=4, fewest_ranks=4) == []


@pytest.mark.parametrize(
    ("override", "ranks", "said"),
    [
        ("parallel={strategy: pipeline, pipeline: 2}", 16, "at most 4 groups of 2 ranks"),
        ("parallel={strategy: pipeline, pipeline: 2}", 7, "write 1, or start 6 ranks"),
        (
            "parallel={strategy: tensor, tensor: 2, replicate: 2}",
            8,
            "parallel.replicate: replicate 2 × tensor 2 needs 4",
        ),
        ("optimization.micro_batch_size=64", 2, "at most 1 rank, one per micro-batch, got 2; start 1 rank,"),
    ],
)
def test_ranks_that_share_layers_have_a_micro_batch_a_group(
    tmp_path: Path, override: str, ranks: int, said: str
) -> None:
    (problem,) = check_start(experiment_of(tmp_path, override), ranks)
    assert said in f"{dotted(problem.path)}: {problem.message}; {problem.remedy}"


def test_a_pipeline_starts_on_any_number_of_a_range_of_nodes(tmp_path: Path) -> None:
    pipeline = experiment_of(tmp_path, "parallel={strategy: pipeline, pipeline: 2}")
    assert check_start(pipeline, 8, ranks_per_node=2, fewest_ranks=2) == []
    (problem,) = check_start(pipeline, 9, ranks_per_node=3, fewest_ranks=3)
    assert problem.path == ("parallel", "pipeline") and "there are 9" in problem.message
    # Without a degree: as many stages as there are ranks.
    assert check_start(experiment_of(tmp_path, "parallel.strategy=split"), 8, 2, fewest_ranks=2) == []


def test_a_schedule_that_the_micro_batches_do_not_fit_is_refused(tmp_path: Path) -> None:
    seven = ("optimization.global_batch_size=112",)
    interleaved = "parallel={strategy: pipeline, schedule: interleaved}"
    (problem,) = check_start(experiment_of(tmp_path, *seven, interleaved), 2)
    assert problem.path == ("parallel", "schedule") and "7 per step" in problem.message
    assert check_start(experiment_of(tmp_path, *seven, interleaved), 4) == []
    assert check_start(experiment_of(tmp_path, *seven, "parallel.strategy=pipeline"), 2) == []


GPT = ("task=causal_lm", "data={name: text, root: a.txt}", "model={name: gpt, args: {tie_embeddings: false}}")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ("parallel={strategy: tensor, tensor: 3}",),
            "parallel.tensor",
            "4 heads of gpt evenly; write 2 or 4",
        ),
        (
            ("parallel={strategy: tensor, tensor: 4}", "model.args={num_heads: 6, dim: 96}"),
            "parallel.tensor",
            "write 2, 3 or 6",
        ),
        (
            ("parallel={strategy: tensor, tensor: 2}", "model.args.num_heads=1"),
            "parallel.tensor",
            "write another",
        ),
        (
            ("parallel={strategy: pipeline, tensor: 2}", "model.args.dropout=0.1"),
            "model.args.dropout",
            "can't drop the weights of attention; write 0",
        ),
        (
            ("parallel={strategy: split, pipeline: 5}",),
            "parallel.pipeline",
            "gpt can be cut into 4; write 2, 3 or 4",
        ),
        (
            ("parallel={strategy: pipeline, pipeline: 3, schedule: interleaved}",),
            "parallel.pipeline",
            "6 stages need a block each, and gpt can be cut into 4; write 2",
        ),
        (
            ("parallel.strategy=pipeline", "model.args.tie_embeddings=true"),
            "model.args.tie_embeddings",
            "last stage, which pipeline does not support; write false",
        ),
        (("parallel.strategy=split", "model.args={}"), "model.args.tie_embeddings", "write false"),
    ],
)
def test_what_of_gpt_ranks_can_not_share_is_named(
    tmp_path: Path, overrides: tuple[str, ...], key: str, said: str
) -> None:
    (line,) = problems_of(tmp_path, GOOD, *GPT, *overrides)
    assert f": {key}: " in line and said in line


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        (
            ("parallel.strategy=tensor",),
            8,
            "parallel.tensor: 8 ranks can't share 4 heads of gpt evenly; write 2 or 4",
        ),
        (("parallel.strategy=tensor",), 3, "start a number of ranks that 2 or 4 divides"),
        (
            ("parallel.strategy=pipeline",),
            6,
            "parallel.pipeline: 6 stages need a block each, and gpt can be cut into 4; write 2 or 3",
        ),
        (("parallel.strategy=pipeline",), 5, "start a number of ranks that 2, 3 or 4 divides"),
        (("parallel.strategy=tensor", "model.args.dropout=0.5"), 2, "model.args.dropout: 2 ranks"),
    ],
)
def test_what_of_gpt_so_many_ranks_can_not_share_is_named(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, said: str
) -> None:
    (problem,) = check_start(experiment_of(tmp_path, *GPT, *overrides), ranks)
    assert said in f"{dotted(problem.path)}: {problem.message}; {problem.remedy}"
    assert check_start(experiment_of(tmp_path, *GPT, *overrides[:1]), 4) == []


#: What the child says of two models (tests/strategies/test_model_facts.py).
TOLD: dict[str, dict[str, Any]] = {
    "timm/test_resnet": {"shared": {}, "dropout_key": None, "most_stages": 3},
    "timm/vit_tiny_patch16_224": {
        "shared": {"heads of blocks.0.attn (num_heads)": 3, "columns of blocks.0.attn.qkv": 192},
        "dropout_key": None,
        "most_stages": 12,
    },
}
VIT = "timm/vit_tiny_patch16_224"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that knows these two."""

    def answer(question: str | None) -> dict[str, Any]:
        if question is None:
            return {"timm": [name.removeprefix("timm/") for name in TOLD]}
        name, args, *_ = json.loads(question)
        is_dropping = "attn_drop_rate" in args
        return TOLD[name] | ({"dropout_key": "model.args.attn_drop_rate"} if is_dropping else {})

    monkeypatch.setattr(model_facts, "_answer", answer)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("model", "parallel", "wrong", "instead"),
    [
        (
            "timm/test_resnet",
            "{strategy: tensor, tensor: 2}",
            "12:22: parallel.strategy: timm/test_resnet has no layers that ranks can share",
            "write another parallel.strategy, like fsdp",
        ),
        (
            "timm/test_resnet",
            "{strategy: pipeline, tensor: 2}",
            "12:40: parallel.tensor: timm/test_resnet has no layers that ranks can share",
            "take it out",
        ),
        (
            VIT,
            "{strategy: tensor, tensor: 4}",
            "12:38: parallel.tensor: 4 ranks can't share 3 heads of blocks.0.attn (num_heads) evenly",
            "write 3",
        ),
        (
            "timm/test_resnet",
            "{strategy: pipeline, pipeline: 4, schedule: interleaved}",
            "12:42: parallel.pipeline: 8 stages need a block each, and timm/test_resnet can be cut into 3",
            "write another parallel.strategy, like fsdp",
        ),
        (
            "timm/test_resnet",
            "{strategy: pipeline, pipeline: 3, schedule: interleaved}",
            "12:55: parallel.schedule: 6 stages need a block each, and timm/test_resnet can be cut into 3",
            "write 1f1b, which has one stage per rank",
        ),
        (
            "timm/test_resnet",
            "{strategy: split, pipeline: 4}",
            "12:39: parallel.pipeline: 4 stages need a block each, and timm/test_resnet can be cut into 3",
            "write 2 or 3",
        ),
        (
            f"{VIT}\n  args: {{attn_drop_rate: 0.1}}",
            "{strategy: tensor, tensor: 3}",
            "5:26: model.args.attn_drop_rate: 3 ranks that share heads can't drop the weights of attention",
            "write 0, or parallel.strategy: fsdp",
        ),
    ],
)
def test_what_of_timms_models_ranks_can_not_share_is_named(
    tmp_path: Path, model: str, parallel: str, wrong: str, instead: str
) -> None:
    (line,) = problems_of(tmp_path, _file(model, parallel))
    assert line == f"exp.yaml:{wrong}; {instead}"


def _file(model: str, parallel: str) -> str:
    return f"{GOOD.replace('acme.models:tiny', model)}parallel: {parallel}\n"


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("model", "strategy", "ranks", "wrong", "instead"),
    [
        ("timm/test_resnet", "tensor", 2, "has no layers that ranks can share", "write another"),
        (VIT, "tensor", 4, "3 heads of blocks.0.attn (num_heads)", "start a number of ranks that 3 divides"),
        (VIT, "tensor", 6, "6 ranks can't share 3 heads", "write 3"),
        ("timm/test_resnet", "pipeline", 4, "timm/test_resnet can be cut into 3", "write 2"),
    ],
)
def test_what_of_timms_models_so_many_ranks_can_not_share_is_named(
    tmp_path: Path, model: str, strategy: str, ranks: int, wrong: str, instead: str
) -> None:
    (problem,) = check_start(
        experiment_of(tmp_path, f"model.name={model}", f"parallel.strategy={strategy}"), ranks
    )
    assert wrong in problem.message and problem.remedy.startswith(instead)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (VIT, "{strategy: tensor, tensor: 3}"),
        (VIT, "{strategy: pipeline, pipeline: 6, tensor: 3, schedule: interleaved}"),
        ("timm/test_resnet", "{strategy: pipeline, pipeline: 3}"),
        ("timm/test_resnet", "{strategy: tensor, tensor: 1}"),
    ],
)
def test_degrees_that_fit_timms_models_pass(tmp_path: Path, model: str, parallel: str) -> None:
    assert problems_of(tmp_path, GOOD, f"model.name={model}", f"parallel={parallel}") == []


def test_a_model_is_not_asked_about_where_that_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model_facts, "facts", lambda name, args: asked.append(name))
    path = tmp_path / "exp.yaml"
    for parallel in ("{strategy: fsdp}", "{strategy: tensor, tensor: 1}", "{strategy: tensor, tensor: 2}"):
        path.write_text(_file("timm/test_resnet", parallel))
        experiment = load(path, check_names=False).experiment
        assert check_start(experiment, 1 if "2" not in parallel else None) == []
    assert not asked


@pytest.mark.parametrize(
    ("args", "degree", "said"),
    [
        ("num_kv_heads: 2", 4, "4 ranks can't share 2 key and value heads of gpt evenly; write 2"),
        ("hidden_dim: 18", 4, "4 ranks can't share 18 columns of the MLP of gpt evenly; write 2"),
        ("num_heads: 6, dim: 96", 3, "3 ranks can't share 256 columns of the MLP of gpt evenly; write 2"),
    ],
)
def test_all_that_ranks_share_of_llama_must_be_divided(
    args: str, degree: int, said: str, tmp_path: Path
) -> None:
    model = f"model={{name: gpt, args: {{style: llama, {args}}}}}"
    parallel = f"parallel={{strategy: tensor, tensor: {degree}}}"
    text = ("data={name: text, root: x}", "task=causal_lm")
    (line,) = problems_of(tmp_path, GOOD, model, parallel, *text)
    assert line.endswith(f"parallel.tensor: {said}")


def test_degrees_of_a_plug_in_that_ignores_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = {"by_parameter": "acme:ByParameter"}
    monkeypatch.setattr(part_rules, "parts", lambda kind: parts(kind) | plugins)
    own = "parallel={strategy: by_parameter, args: {buckets: 3}}"
    assert problems_of(tmp_path, GOOD, own) == []
    (line,) = problems_of(tmp_path, GOOD, own, "parallel.shard=2")
    assert "parallel.shard: 2 does not apply to strategy by_parameter; take it out; its arguments" in line


def experiment_of(tmp_path: Path, *overrides: str) -> Experiment:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    return load(path, overrides).experiment


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
        '#!/bin/sh\ncase "$*" in\n*model_facts*)\n read question\n case "$question" in\n'
        " *resnet*) echo '{\"has_batchnorm\": true}' ;;\n"
        " *) echo '{\"has_batchnorm\": false}' ;;\n esac ;;\n"
        f"*) echo '{json.dumps(answer)}' ;;\nesac\n"
    )
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    model_facts.forget_answers()
    yield
    model_facts.forget_answers()


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
        (
            ("model.name=timm/resnet50", "parallel.strategy=pipeline", "precision=fp16"),
            "fp16 does not work under pipeline for timm/resnet50, which has BatchNorm",
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
        (("compile={mode: reduce-overhead}", "parallel.strategy=tensor"), "compile.mode"),
        (("compile={scope: model}", "parallel.strategy=pipeline"), "compile.scope"),
        (("compile={scope: model}", "parallel.strategy=split"), "compile.scope"),
        (
            ("optimization.optimizer={name: adafactor, lr: 0.1}", "parallel.strategy=tensor"),
            "optimization.optimizer.name",
        ),
        (
            ("optimization.optimizer={name: lamb, lr: 0.1}", "parallel.strategy=pipeline"),
            "optimization.optimizer.name",
        ),
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


def test_lamb_that_leaves_clipping_to_the_file_is_allowed_where_ranks_share_layers(tmp_path: Path) -> None:
    lamb = "optimization.optimizer={name: lamb, lr: 0.1, args: {max_grad_norm: null}}"
    assert problems_of(tmp_path, GOOD, lamb, "parallel.strategy=pipeline") == []


def test_a_missing_optional_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(tmp_path, GOOD, "logging.tensorboard=true") == []
    monkeypatch.setattr(logging_rules, "find_spec", lambda name: None)
    (line,) = problems_of(tmp_path, GOOD, "logging.tensorboard=true")
    assert "logging.tensorboard: the package" in line and "pip install 'hpc-train[tensorboard]'" in line
    elsewhere = ("logging.tensorboard=true", "environment.python=/opt/venv/bin/python")
    assert problems_of(tmp_path, GOOD, *elsewhere) == []


def test_packages_of_mlflow_are_needed_by_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    server, database = (f"logging.mlflow.tracking_uri={uri}" for uri in ("https://x.org", "sqlite:////x.db"))
    assert problems_of(tmp_path, GOOD, server) == problems_of(tmp_path, GOOD, database) == []
    monkeypatch.setattr(logging_rules, "find_spec", lambda name: name if name == "mlflow" else None)
    assert problems_of(tmp_path, GOOD, server) == []
    (line,) = problems_of(tmp_path, GOOD, database)
    assert "the package sqlalchemy is not installed" in line and "pip install 'hpc-train[mlflow]'" in line
    assert problems_of(tmp_path, GOOD, database, "environment.python=/opt/venv/bin/python") == []
    monkeypatch.setattr(logging_rules, "find_spec", lambda name: None)
    assert "the package mlflow is not installed" in problems_of(tmp_path, GOOD, server)[0]


def test_mlflow_needs_a_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (line,) = problems_of(tmp_path, GOOD, "logging.mlflow={}")
    assert "logging.mlflow.tracking_uri: is not given, and MLFLOW_TRACKING_URI is not set" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:hunter2@x.org")
    assert problems_of(tmp_path, GOOD, "logging.mlflow={}") == []
