from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_train.errors import BadFileError, ExitCode, PeerLostError, StorageError
from hpc_train.experiment.topology.degrees import candidates
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.rules import check_start
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.found_micro_batch import Found, keep, kept, kept_size
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.training.batch_size_search import FAILED, OUT_OF_MEMORY, PEER, doubling, last_words
from tests.cli.commands import hpc_train
from tests.config.files import GOOD, problems_of
from tests.refused_calls import IS_POSSIBLE, prefix
from tests.run.runs import small_run
from tests.waiting import HANG_LIMIT_S

AUTO = GOOD.replace("micro_batch_size: 16", "micro_batch_size: auto")
FOUND = Found(size=16, too_large=32, ranks=2, attempt=1)


def test_a_size_divides_the_batch_and_leaves_each_rank_a_micro_batch() -> None:
    assert candidates(48, 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert candidates(48, 3) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert candidates(48, 5) == [1, 2, 3, 4, 6, 8]
    assert candidates(4, 8) == []


def test_first_tried_are_sizes_that_double_up_to_the_largest() -> None:
    assert doubling(candidates(48, 1)) == [1, 3, 6, 12, 24, 48]
    assert doubling(candidates(1000, 8)) == [1, 2, 5, 10, 25, 50, 125]
    assert doubling(candidates(256, 2)) == [1, 2, 4, 8, 16, 32, 64, 128]

    assert doubling([2, 3]) == [2, 3]
    assert doubling([4, 6, 8, 12, 20]) == [4, 8, 20]
    assert doubling([]) == []


def test_what_was_found_first_is_kept_and_a_damaged_file_is_not_taken_for_none(
    tmp_path: Path,
) -> None:
    paths = small_run(tmp_path)
    assert kept(paths) is None
    assert keep(paths, FOUND) == FOUND
    assert keep(paths, Found(size=8, too_large=16, ranks=2, attempt=2)) == FOUND
    assert kept(paths) == FOUND
    assert [path.name for path in paths.folder.iterdir() if path.name.startswith(".")] == []
    paths.micro_batch.write_text('{"size": 0}')
    with pytest.raises(StorageError, match="another micro_batch_size would be another run"):
        kept(paths)
    assert kept_size(paths) is None


def raised(error: BaseException) -> tuple[str, str, int]:
    try:
        raise error
    except BaseException as caught:
        return last_words(caught)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_runs_out_is_known_however_it_is_said(error: BaseException) -> None:
    outcome, words, _ = raised(error)
    assert outcome == OUT_OF_MEMORY
    assert "\n" not in words


def test_other_ends_of_a_trial_are_told_apart() -> None:
    assert raised(RuntimeError("Connection closed by peer [127.0.0.1]:1"))[0] == PEER
    assert raised(PeerLostError("gone"))[0] == PEER
    assert raised(BadFileError("model.name: is wrong")) == (FAILED, "model.name: is wrong", ExitCode.BAD_FILE)
    outcome, words, code = raised(ValueError("shapes differ"))
    assert (outcome, code) == (FAILED, ExitCode.FAILED)
    assert words.startswith("Traceback") and words.rstrip().endswith("ValueError: shapes differ")


def test_a_gpu_that_takes_one_process_alone_is_told_what_to_write() -> None:
    refusal = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with …")
    outcome, words, code = raised(refusal)
    assert (outcome, code) == (FAILED, ExitCode.BAD_FILE)
    assert words.startswith("optimization.micro_batch_size: auto tries sizes in a second process")
    assert words.endswith("write a number, like 64") and "\n" not in words


_KEEPS = """
import sys
from pathlib import Path
from hpc_train.paths import RunPaths
from hpc_train.run.found_micro_batch import Found, keep
for size in (16, 8):
    print(keep(RunPaths(Path(sys.argv[1])), Found(size, too_large=32, ranks=2, attempt=1)).size)
"""


@pytest.mark.skipif(not IS_POSSIBLE, reason="system calls are refused by number, on Linux on x86-64")
def test_the_first_result_counts_without_hard_links(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    command = [*prefix(["link", "linkat"], "EPERM"), sys.executable, "-c", _KEEPS, str(paths.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True)
    assert done.stdout.split() == ["16", "16"]
    assert kept(paths) == FOUND


def test_auto_is_refused_for_a_model_with_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "has_batchnorm", lambda name, args: "resnet" in name)
    monkeypatch.setattr(model_facts, "known_names", lambda kind: ["resnet50", "vit_tiny_patch16_224"])
    text = AUTO.replace("acme.models:tiny", "timm/resnet50")
    (line,) = problems_of(tmp_path, text)
    assert line.startswith("exp.yaml:10:21: optimization.micro_batch_size: auto would make BatchNorm's")
    assert problems_of(tmp_path, text, "optimization.micro_batch_size=16") == []
    vit = ("model.name=timm/vit_tiny_patch16_224", "data.image_size=224")
    assert problems_of(tmp_path, text, *vit) == []


def test_auto_starts_on_as_many_ranks_as_the_batch_has_samples(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(AUTO)
    experiment = load(path).experiment
    assert [check_start(experiment, ranks) for ranks in (None, 1, 3, 64)] == [[], [], [], []]
    (problem,) = check_start(experiment, 65)
    assert problem.message == "auto needs at most 64 ranks, one per micro-batch, got 65"
    (problem,) = check_start(experiment.model_copy(update={"device": "cpu"}), None)
    assert problem.message.startswith("auto finds what fits into the memory of a GPU")
    assert check_start(experiment.model_copy(update={"device": "cpu"}), 4, found=16) == []
    assert check_start(experiment, 4, found=16) == []
    (problem,) = check_start(experiment, 5, found=16)
    assert problem.message.startswith("auto found 16 in the run's first attempt")
    assert "submit --new" in problem.remedy


@pytest.fixture
def failed() -> RunPaths:
    """A run that found its size and then broke."""
    optimization = {"steps": 10, "global_batch_size": 64, "micro_batch_size": "auto"}
    paths = small_run(runs_root(), optimization=optimization | {"optimizer": {"name": "sgd", "lr": 0.1}})
    keep(paths, FOUND)
    write_status(paths, RunStatus(state="failed", attempt=1, reason="so"))
    return paths


def test_a_resume_on_too_many_ranks_names_what_was_found(failed: RunPaths) -> None:
    done = hpc_train("resume", failed.folder, "--local", "--devices", "5")
    assert done.code == ExitCode.BAD_FILE
    (line,) = [line for line in done.err.splitlines() if "micro_batch_size" in line]
    assert "resolved.json:" in line
    assert "optimization.micro_batch_size: auto found 16 in the run's first attempt" in line
    assert "at most 4 ranks, one per micro-batch, got 5; start 4 ranks or fewer" in line


def test_status_says_what_was_found(failed: RunPaths) -> None:
    assert "optimization.micro_batch_size: auto is 16 in this run" in hpc_train("status", failed.folder).err
    row = json.loads(hpc_train("status", failed.folder, "--json").out)["runs"][0]
    assert row["micro_batch_size"] == 16


def test_a_plan_says_auto_until_the_run_has_found_its_size(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(AUTO)
    before = json.loads(hpc_train("plan", file, "--json").out)["runs"][0]
    assert before["micro_batches"] is None and before["accumulation"] is None
    assert hpc_train("plan", file).out.splitlines()[1].split()[2:4] == ["auto", "auto"]
    paths = RunPaths(runs_root() / "digits-test" / before["id"])
    paths.folder.mkdir(parents=True)
    keep(paths, FOUND)
    after = json.loads(hpc_train("plan", file, "--json").out)["runs"][0]
    assert (after["micro_batches"], after["accumulation"]) == (4, 4)
