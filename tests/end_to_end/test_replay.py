"""``replay`` repeats steps of a run bitwise, does not change the run, and names the module that makes NaN."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
from hpc_train.run.digests import encoded, read_digests
from hpc_train.training.datasets.sources import digits
from tests.cli.json_checks import checked
from tests.end_to_end.runs import COMPILED, hpc_train, rows, status, work_tree
from tests.end_to_end.test_evaluate import content
from tests.end_to_end.test_non_finite import train
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: The checkpoints of steps 21, 28 and 30 are kept.
STEP, CHECKPOINT = 24, 21


def replayed(run: RunPaths, *options: str, code: int = 0) -> dict[str, Any]:
    done = hpc_train("replay", run.folder, "--json", *options)
    assert done.code == code, done.err + done.out
    answer: dict[str, Any] = checked("replay", done.out)
    assert (answer["version"], answer["path"]) == (1, str(run.folder))
    return answer


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("zero1", marks=pytest.mark.soak)])
def test_steps_are_repeated_bitwise_on_as_many_ranks(strategy: str, quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of(f"parallel.strategy={strategy}")
    before = content(run)
    answer = replayed(run, "--step", str(STEP), "--to", str(STEP + 1))
    assert (answer["checkpoint"], answer["ranks"], answer["ranks_of_run"]) == (CHECKPOINT, 2, 2)
    (replay,) = answer["replays"]
    assert (replay["compared"], replay["first_difference"]) == (2, None)
    for step, row in zip(replay["steps"], rows(run, "train")[STEP - 1 :], strict=False):
        assert step["step"] == row["step"] and step["differs"] == []
        assert (step["loss"], step["grad_norm"]) == (row["loss"], row["grad_norm"])
        assert [batch["number"] for batch in step["micro_batches"]] == [0, 1, 2, 3]
        assert {len(batch["samples"]) for batch in step["micro_batches"]} == {12}
        assert sum(batch["loss"] for batch in step["micro_batches"]) / 4 == pytest.approx(step["loss"])
        squares = sum(norm**2 for norm in step["grad_norms"].values())
        assert squares**0.5 == pytest.approx(step["grad_norm"], rel=1e-5)
    assert content(run) == before


def test_one_rank_repeats_them_with_the_same_samples(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    run, file = quiet_runs.of("parallel.strategy=ddp"), tmp_path / "batch.safetensors"
    options = ("--step", str(CHECKPOINT + 1), "--devices", "1", "--save-batch", str(file))
    answer = replayed(run, *options, "--set", "optimization.clip_grad_norm=0.01")
    plain, changed = (replay["steps"][0] for replay in answer["replays"])
    assert "samples" not in plain["differs"] and plain["loss"] == pytest.approx(plain["recorded"]["loss"])
    assert answer["replays"][1]["changes"] == ["optimization.clip_grad_norm=0.01"]
    assert changed["loss"] == plain["loss"], "the weights change after the first step"
    batch = load_file(file)
    for micro_batch in plain["micro_batches"]:
        name = f"micro_batch.{micro_batch['number']}"
        assert batch[f"{name}.samples"].tolist() == micro_batch["samples"]
        assert batch[f"{name}.inputs"].shape == (12, 1, 32, 32)
    text = hpc_train("replay", run.folder, *options[:4])
    assert text.code == 0 and "step 22: loss " in text.out and "micro-batch" in text.out, text.err


SHORT = ("optimization.steps=4", "optimization.schedule={name: constant}", "checkpoint.every_steps=3")
VIT = ('model={name: "tests.end_to_end.paced:vit", args: {dropout: 0.0}}', *SHORT)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("parallel.strategy=zero2", *SHORT), 2),
        pytest.param(("parallel.strategy=hsdp", *SHORT), 2, marks=pytest.mark.soak),
        (("parallel.strategy=tensor", *VIT), 2),
        (("parallel.strategy=pipeline", *VIT), 2),
        # A pipeline with one micro-batch.
        pytest.param(("parallel.strategy=split", *VIT), 2, marks=pytest.mark.soak),
        # test_bisect.py compares all digests of a compiled run with its replay.
        pytest.param(COMPILED, 1, marks=pytest.mark.soak),
        (("activation_checkpointing=blocks", *VIT), 2),
    ],
    ids=lambda value: value[0].partition("=")[2] if isinstance(value, tuple) else str(value),
)
def test_a_step_is_repeated_bitwise(words: tuple[str, ...], ranks: int, quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of(*words, ranks=ranks)
    last = 8 if words == COMPILED else 4
    answer = replayed(run, "--step", str(last))
    assert (answer["checkpoint"], answer["ranks"]) == (last - 1, ranks)
    (step,) = answer["replays"][0]["steps"]
    assert step["differs"] == [] and step["compared"] == ["samples", "loss", "grad_norm"]
    assert [batch["number"] for batch in step["micro_batches"]] == [0, 1, 2, 3]
    assert all(batch["loss"] is not None for batch in step["micro_batches"])
    squares = sum(norm**2 for norm in step["grad_norms"].values())
    assert squares**0.5 == pytest.approx(step["grad_norm"], rel=1e-5)
    if "compile=true" not in words:
        ranges = replayed(run, "--step", str(last), "--activations")["replays"][0]["steps"][0]["activations"]
        assert len(ranges) >= len(step["grad_norms"]) and None not in ranges.values()


def test_samples_ranges_and_a_trace_are_written(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    run = quiet_runs.of("parallel.strategy=ddp")
    batch, samples, trace = tmp_path / "batch.safetensors", tmp_path / "samples", tmp_path / "trace.json.gz"
    files = ("--save-batch", batch, "--save-samples", samples, "--profile", trace)
    answer = replayed(run, "--step", str(CHECKPOINT + 1), "--activations", *map(str, files))
    (step,) = answer["replays"][0]["steps"]
    tensors, pictures = load_file(batch), sorted(samples.iterdir())
    assert len(pictures) == 48
    for micro_batch in step["micro_batches"]:
        number = micro_batch["number"]
        for place, index in enumerate(micro_batch["samples"]):
            picture = np.asarray(Image.open(samples / f"micro-batch-{number}.{place}-sample-{index}.png"))
            expected = tensors[f"micro_batch.{number}.inputs"][place, 0].numpy()
            assert (picture == expected[:, :, None]).all()
    # The stem's outputs, computed again from the checkpoint's weights.
    checkpoint = run.checkpoint(CHECKPOINT)
    weights = load_file(checkpoint.shard(0)) | load_file(checkpoint.shard(1))
    images = torch.cat([tensors[f"micro_batch.{number}.inputs"] for number in range(4)])
    normalized = (images.double() / 255 - digits._MEAN) / digits._STD
    stem = torch.nn.functional.conv2d(
        normalized, weights["model.0.weight"].double(), weights["model.0.bias"].double(), stride=4
    )
    expected_range = {"minimum": stem.min(), "maximum": stem.max(), "mean_abs": stem.abs().mean()}
    assert step["activations"]["0"] == pytest.approx(
        {name: float(value) for name, value in expected_range.items()}, rel=1e-4
    )
    assert list(step["activations"])[-1] == "" and step["differs"] == []
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("convolution" in event["name"] for event in events)


TOKENS = """\
name: letters
task: causal_lm
model: {name: gpt, args: {num_layers: 1, num_heads: 2, dim: 16}}
data: {name: text, root: ROOT, args: {sequence_length: 32}}
optimization: {steps: 3, global_batch_size: 4, micro_batch_size: 2, optimizer: {name: adamw, lr: 0.005}}
checkpoint: {every_steps: 2}
"""


def test_tokens_are_decoded(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    text = "".join(f"{number} sheep and {number * number} goats. " for number in range(200))
    (tmp_path / "sheep.txt").write_text(text)
    run = quiet_runs.of(text=TOKENS.replace("ROOT", str(tmp_path / "sheep.txt")), ranks=1)
    samples = tmp_path / "samples"
    answer = replayed(run, "--step", "3", "--save-samples", str(samples))
    for micro_batch in answer["replays"][0]["steps"][0]["micro_batches"]:
        expected = [text[32 * index : 32 * index + 32] for index in micro_batch["samples"]]
        assert micro_batch["texts"] == expected
    assert sorted(file.suffix for file in samples.iterdir()) == [".txt"] * 4
    shown = hpc_train("replay", run.folder, "--step", "3").out
    assert f"{micro_batch['samples'][0]}" in shown and expected[0] in shown


def test_the_debugger_stops_at_the_step(quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of("parallel.strategy=ddp")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hpc_train",
            "replay",
            run.folder,
            "--step",
            "22",
            "--debugger",
            "--devices",
            "1",
        ],
        input="p step, len(batches)\np type(state.model).__name__\nc\n",
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=work_tree(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    begin, _, rest = done.stdout.partition("(21, 4)")
    assert "step 22 begins" in begin and "'Net'" in rest and "step 22: loss " in rest


def test_a_replay_that_differs_is_reported(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """The digest of step 23 is that of a run with other bits."""
    run = quiet_runs.of("parallel.strategy=ddp")
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    records = list(read_digests(copy.digests))
    content = bytearray(copy.digests.read_bytes())
    other = records[22].__class__(23, records[22].samples, 1.0, records[22].grad_norm, 1)
    content[16 + 22 * 40 : 16 + 23 * 40] = encoded(other)
    copy.digests.write_bytes(content)
    answer = replayed(copy, "--step", "23", code=1)
    assert answer["replays"][0]["steps"][0]["differs"] == ["loss"]
    later = replayed(copy, "--step", "25", code=1)
    assert later["replays"][0]["first_difference"] == 23


def copy_run(run: RunPaths, copy: RunPaths) -> None:
    shutil.copytree(run.folder, copy.folder, symlinks=True)
    shutil.copytree(run.folder.parent.parent / ".code", copy.folder.parent.parent / ".code", symlinks=True)


@pytest.mark.fault(20)
def test_the_module_that_makes_nan_is_named(tmp_path: Path) -> None:
    run, done = train(tmp_path)
    assert done.code == 1
    reason = status(run)["reason"]
    _, _, command = reason.partition("hpc-train replay ")
    run_id, option, step = command.split()[:3]
    assert (run_id, option) == (run.folder.name, "--step"), reason
    before = content(run)
    (replay,) = replayed(run, "--step", step)["replays"]
    (last,) = replay["steps"]
    assert last["loss"] is None and last["differs"] == [] and replay["first_difference"] is None
    bad = [batch["number"] for batch in last["micro_batches"] if batch["loss"] is None]
    place = last["non_finite"]
    expected = {"where": "before", "module": "", "type": "Poisoned", "before": "0"}
    assert place == place | expected | {"micro_batch": min(bad)}
    assert content(run) == before
