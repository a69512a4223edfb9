"""``replay`` repeats steps of a run bitwise, does not change the run, and names the module that makes NaN."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
from hpc_train.run.digests import encoded, read_digests
from tests.cli.json_checks import checked
from tests.end_to_end.runs import hpc_train, rows, status
from tests.end_to_end.test_evaluate import content
from tests.end_to_end.test_non_finite import train
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: The checkpoints of steps 49, 56 and 60 are kept.
STEP, CHECKPOINT = 52, 49


def replayed(run: RunPaths, *options: str, code: int = 0) -> dict[str, Any]:
    done = hpc_train("replay", run.folder, "--json", *options)
    assert done.code == code, done.err + done.out
    answer: dict[str, Any] = checked("replay", done.out)
    assert (answer["version"], answer["path"]) == (1, str(run.folder))
    return answer


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
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
    assert text.code == 0 and "step 50: loss " in text.out and "micro-batch" in text.out, text.err


def test_a_replay_that_differs_is_reported(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """The digest of step 51 is that of a run with other bits."""
    run = quiet_runs.of("parallel.strategy=ddp")
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    records = list(read_digests(copy.digests))
    content = bytearray(copy.digests.read_bytes())
    other = records[50].__class__(51, records[50].samples, 1.0, records[50].grad_norm, 1)
    content[16 + 50 * 40 : 16 + 51 * 40] = encoded(other)
    copy.digests.write_bytes(content)
    answer = replayed(copy, "--step", "51", code=1)
    assert answer["replays"][0]["steps"][0]["differs"] == ["loss"]
    later = replayed(copy, "--step", "53", code=1)
    assert later["replays"][0]["first_difference"] == 51


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
