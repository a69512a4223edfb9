"""What only a CUDA device can show: one rank over NCCL, through the real command.

Several GPUs in one machine run the same code with more ranks; these tests need one.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.gpu import merged
from hpc_train.errors import BadFileError
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.validate.loading import load
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.run.checkpoints import committed
from hpc_train.run.found_micro_batch import kept
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from hpc_train.session.objects import restore, staged
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.distributed.process_group import join
from hpc_train.training.forward import TrainingForward
from hpc_train.training.health import node_check
from hpc_train.training.meters import Meters
from hpc_train.training.non_finite import FiniteWatch, Guard
from hpc_train.training.step import StepResult, train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.tasks.base import make_task
from hpc_train.training.train_state import build, use_float8
from tests import fake_cuda
from tests.end_to_end import paced
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    final_tensors,
    found_runs,
    hpc_train,
    kill_everything,
    last_step,
    only_run,
    rows,
    start,
    status,
    submit,
    wait_for,
    write_experiment,
)
from tests.parallelism.cases import MODEL_PARALLEL, SHARDED, STRATEGIES
from tests.waiting import HANG_LIMIT_S

Test = TypeVar("Test", bound=Callable[..., None])
#: torch says once that its debug mode does not find every wait.
debug_mode = pytest.mark.filterwarnings("ignore:Synchronization debug mode")

CUDA = "device=cuda"
SHORT = (
    "optimization.steps=8",
    "optimization.schedule={name: constant}",
    "evaluation.every_steps=8",
    "model.args={norm: false, dropout: 0}",
)
SGD = "optimization.optimizer={name: sgd, lr: 0.05, momentum: 0.9}"
PACED = EXPERIMENT.replace("parts:net", "paced:net")
#: A transformer, whose layers ranks can share.
VIT = EXPERIMENT.replace("parts:net", "paced:vit")
VIT_SHORT = (*SHORT[:3], "model.args={dropout: 0}", SGD)
#: Each schedule of a pipeline; the one rank has all stages.
PIPELINES = (
    "{strategy: pipeline, schedule: gpipe}",
    "{strategy: pipeline, schedule: 1f1b}",
    "{strategy: pipeline, schedule: interleaved}",
)
EMA = "optimization.ema={decay: 0.9}"
#: What a checkpoint holds of any precision but fp64.
KEPT_IN = {torch.float32, torch.int64}
PARALLEL = (*(f"{{strategy: {name}}}" for name in STRATEGIES if name != "pipeline"), *PIPELINES)


def on_gpu(test: Test) -> Test:
    """Mark a test that needs a CUDA device; elsewhere it is skipped and says so."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    marked: Test = pytest.mark.gpu(pytest.mark.slow(missing(test)))
    return marked


def needs_real_gpu(what: str) -> None:
    """Skip the rest of a test on the stand-in."""
    if fake_cuda.is_here():
        pytest.skip(f"only on a real GPU: {what}")


def submit_on_gpu(folder: Path, *overrides: str, text: str = EXPERIMENT) -> RunPaths:
    if any(each.startswith("compile=") and each != "compile=false" for each in overrides):
        needs_real_gpu("Triton compiles")
    paths = submit(folder, CUDA, *overrides, devices=1, text=text)
    assert "on 1 × cuda:0" in paths.attempt(1).log(0).read_text()
    return paths


def losses(paths: RunPaths) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in rows(paths, "train")], dtype=torch.float64)


def tensors_of(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def assert_losses_are_close(one: RunPaths, other: RunPaths, tolerance: float) -> None:
    torch.testing.assert_close(losses(one), losses(other), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """The same training without a GPU, in fp32."""
    return submit(tmp_path_factory.mktemp("on_cpu"), "device=cpu", *SHORT, SGD, devices=1)


@pytest.fixture(scope="module")
def vit_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A transformer without a GPU, in fp32."""
    folder = tmp_path_factory.mktemp("vit_on_cpu")
    return submit(folder, "device=cpu", *VIT_SHORT, EMA, devices=1, text=VIT)


# --- strategies and precision


@on_gpu
@pytest.mark.parametrize("parallel", PARALLEL)
def test_every_strategy_trains_on_one_gpu_as_ddp_does_on_the_cpu(
    parallel: str, vit_on_cpu: RunPaths, tmp_path: Path
) -> None:
    """NCCL's group of one; clipped and averaged."""
    overrides = (*VIT_SHORT, EMA, f"parallel={parallel}", "deterministic=true")
    paths = submit_on_gpu(tmp_path, *overrides, text=VIT)
    assert_losses_are_close(paths, vit_on_cpu, 1e-3)
    ours, theirs = final_tensors(paths), final_tensors(vit_on_cpu)
    assert ours.keys() == theirs.keys(), "one layout of files"
    torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), rtol=0, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_strategy_trains_in_half_precision(
    precision: str, parallel: str, vit_on_cpu: RunPaths, tmp_path: Path
) -> None:
    overrides = (*VIT_SHORT, EMA, f"parallel={parallel}", f"precision={precision}")
    paths = submit_on_gpu(tmp_path, *overrides, text=VIT)
    # fp16's scaler may leave the first steps out; before them nothing but rounding differs.
    torch.testing.assert_close(losses(paths)[:1], losses(vit_on_cpu)[:1], rtol=0, atol=0.05)
    assert float(losses(paths)[-1]) == pytest.approx(float(losses(vit_on_cpu)[-1]), abs=0.3)
    assert {value.dtype for value in tensors_of(final_tensors(paths)).values()} <= KEPT_IN


@on_gpu
@pytest.mark.parametrize("compiled", ["false", "true", "{mode: max-autotune}"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in MODEL_PARALLEL])
def test_fp8_trains_as_fp32_does_but_for_rounding(
    strategy: str, compiled: str, vit_on_cpu: RunPaths, tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no float8 products")
    if strategy in SHARDED and "mode" in compiled:
        pytest.skip("refused: the mode replays CUDA graphs")
    overrides = (*VIT_SHORT, EMA, f"parallel.strategy={strategy}", "precision=fp8", f"compile={compiled}")
    paths = submit_on_gpu(tmp_path, *overrides, text=VIT)
    torch.testing.assert_close(losses(paths), losses(vit_on_cpu), rtol=0, atol=0.3)
    ours = final_tensors(paths)
    assert ours.keys() == final_tensors(vit_on_cpu).keys(), "a checkpoint of any precision"
    assert {value.dtype for value in tensors_of(ours).values()} <= KEPT_IN


@on_gpu
@pytest.mark.parametrize("rows", [32, 7])
@pytest.mark.parametrize("autocasts", [True, False])
def test_float8_products_are_those_of_the_emulation(rows: int, autocasts: bool) -> None:
    """Of numbers of rows that 16 divides and of others, under autocast and in bf16 as FSDP casts."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no float8 products")
    torch.manual_seed(0)
    inputs, weights = torch.randn(rows, 64).bfloat16(), nn.Linear(64, 32).state_dict()
    found = {}
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        block = nn.Sequential(nn.Linear(64, 32))
        block[0].load_state_dict(weights)
        use_float8([block], device)
        block.to(device, torch.float32 if autocasts else torch.bfloat16)
        given = inputs.to(device, copy=True).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocasts):
            outputs = block(given)
        outputs.float().square().mean().backward()
        assert outputs.dtype == torch.bfloat16 and given.grad is not None
        numbers = [outputs.detach(), given.grad, *(value.grad for value in block.parameters())]
        found[device.type] = [value.float().cpu() for value in numbers if value is not None]
    for here, there in zip(found["cuda"], found["cpu"], strict=True):
        # The same casts; sums are of another order and accuracy, so that now and then a number is rounded to
        # the next bf16 (2^-9) and its gradient to the next e5m2 (2^-2).
        assert float((here - there).norm() / there.norm()) < 2**-5


@on_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gpu_trains_as_the_cpu_does(strategy: str, on_cpu: RunPaths, tmp_path: Path) -> None:
    override = f"parallel.strategy={strategy}"
    paths = submit_on_gpu(tmp_path, *SHORT, SGD, override, "deterministic=true")
    assert_losses_are_close(paths, on_cpu, 1e-4)
    assert final_tensors(paths).keys() == final_tensors(on_cpu).keys()


@on_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", "torch.bfloat16"), ("fp16", "torch.float16"), ("tf32", "torch.float32")],
)
def test_activations_are_of_the_precision_asked_for(
    precision: str, dtype: str, strategy: str, on_cpu: RunPaths, tmp_path: Path
) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    seen = tmp_path / "dtypes"
    model = f'model={{name: "tests.end_to_end.parts:recording", args: {{path: "{seen}"}}}}'
    overrides = (f"precision={precision}", f"parallel.strategy={strategy}")
    paths = submit_on_gpu(tmp_path, *SHORT[:3], SGD, model, *overrides)
    assert set(seen.read_text().split()) == {dtype}
    assert final_tensors(paths)["model.net.0.weight"].dtype == torch.float32
    # The same weights at the start, the same samples: only rounding differs.
    assert float(losses(paths)[0]) == pytest.approx(float(losses(on_cpu)[0]), abs=0.05)


@on_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp16_keeps_its_loss_scale_in_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    paths = submit_on_gpu(tmp_path, *SHORT, "precision=fp16", f"parallel.strategy={strategy}")
    saved = [json.loads(each.state.read_text())["scaler"] for each in committed(paths)]
    assert len(saved) == 2
    assert all(state["scale"] >= 1 for state in saved)
    assert saved[0]["_growth_tracker"] >= 1, "good steps since the scale last changed"


@on_gpu
def test_channels_last_is_another_layout_of_the_same_numbers(on_cpu: RunPaths, tmp_path: Path) -> None:
    model = 'model={name: "tests.end_to_end.paced:channels_last_only", channels_last: true}'
    paths = submit_on_gpu(tmp_path, *SHORT[:3], SGD, model)
    assert_losses_are_close(paths, on_cpu, 1e-3)


@on_gpu
@pytest.mark.parametrize("strategy", MODEL_PARALLEL)
def test_compiled_blocks_train_where_ranks_share_layers(
    strategy: str, vit_on_cpu: RunPaths, tmp_path: Path
) -> None:
    overrides = (*VIT_SHORT, EMA, f"parallel.strategy={strategy}", "compile=true")
    paths = submit_on_gpu(tmp_path, *overrides, text=VIT)
    assert any("triton" in path.read_text() for path in (paths.cache / "inductor").rglob("*.py"))
    assert_losses_are_close(paths, vit_on_cpu, 1e-3)


@on_gpu
@pytest.mark.parametrize("scope", ["blocks", "model"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "zero2"])
def test_compiled_code_trains_as_eager_does(
    scope: str, strategy: str, on_cpu: RunPaths, tmp_path: Path
) -> None:
    overrides = (f"compile={{scope: {scope}}}", f"parallel.strategy={strategy}")
    paths = submit_on_gpu(tmp_path, *SHORT, SGD, *overrides)
    assert any("triton" in path.read_text() for path in (paths.cache / "inductor").rglob("*.py"))
    assert_losses_are_close(paths, on_cpu, 1e-3)
    assert final_tensors(paths).keys() == final_tensors(on_cpu).keys(), "names are those of the plain model"


# --- ends


@on_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_killed_and_resumed_equals_the_uninterrupted_run_bitwise(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    # FSDP can't cast a BatchNorm's statistics: only ddp's model has one.
    text = PACED if strategy == "ddp" else VIT
    overrides = (
        CUDA,
        "deterministic=true",
        f"parallel.strategy={strategy}",
        f"precision={precision}",
        "model.args={dropout: 0.2}",
    )
    quiet = submit(tmp_path / "quiet", *overrides, devices=1, text=text)
    folder = tmp_path / "killed"
    experiment, local = write_experiment(folder, text), ("--local", "--devices", "1")
    places = {"HPC_TRAIN_RUNS": str(folder / "runs"), paced.TRAIN_S: "0.02"}
    process = start("submit", experiment, *overrides, *local, **places)
    wait_for(lambda: bool(found_runs(folder)) or process.poll() is not None, "the run's folder")
    paths = only_run(folder)
    wait_for(lambda: last_step(paths) >= 25 or process.poll() is not None, "step 25")
    assert process.poll() is None, process.communicate()[1]
    kill_everything(process, paths)
    process.communicate()
    done = hpc_train("resume", paths.folder, "data.workers=2")
    assert done.code == 0, done.err
    assert status(paths)["attempt"] == 2
    assert_equal_to_the_bit(quiet, paths)


@on_gpu
def test_ctrl_c_saves_and_a_resume_continues(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, PACED)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), paced.TRAIN_S: "0.02"}
    process = start("submit", experiment, CUDA, "--local", "--devices", "1", **runs)
    wait_for(lambda: bool(found_runs(tmp_path)) or process.poll() is not None, "the run's folder")
    paths = only_run(tmp_path)
    wait_for(lambda: last_step(paths) >= 5 or process.poll() is not None, "step 5")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 130, err
    assert committed(paths)[0].step == status(paths)["step"] == last_step(paths)
    done = hpc_train("resume", paths.folder)
    assert done.code == 0, done.err
    assert [row["step"] for row in rows(paths, "train")] == list(range(1, 61))


@on_gpu
def test_a_checkpoint_of_the_gpu_continues_on_the_cpu(on_cpu: RunPaths, tmp_path: Path) -> None:
    long = (*SHORT[1:], "optimization.steps=16", SGD)
    experiment = write_experiment(tmp_path, PACED)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), paced.TRAIN_S: "0.05"}
    process = start("submit", experiment, CUDA, *long, "--local", "--devices", "1", **runs)
    wait_for(lambda: bool(found_runs(tmp_path)) or process.poll() is not None, "the run's folder")
    paths = only_run(tmp_path)
    wait_for(lambda: bool(committed(paths)) or process.poll() is not None, "a checkpoint")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    done = hpc_train("resume", paths.folder, "device=cpu")
    assert done.code == 0, done.err
    torch.testing.assert_close(losses(paths)[:8], losses(on_cpu), rtol=0, atol=1e-3)


# --- nothing waits


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """A CUDA device in a process group of this process alone."""
    found = torch.device("cuda", 0)
    torch.cuda.set_device(found)
    group = join(RankFacts(), found, tmp_path / "rendezvous.json", token="")
    yield found
    group.leave()


@on_gpu
def test_batches_come_in_pinned_memory(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    experiment = load(write_experiment(tmp_path), ["data.workers=1"]).experiment
    source = build_source(experiment.data)
    with training_batches(source, experiment, Position(0), 3, 0, 1, device) as batches:
        for _, micro_batches in batches:
            assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() for batch in micro_batches)
    assert source.val is not None
    for batch in evaluation_batches(source.val, experiment, 0, 1, device):
        assert batch.inputs.is_pinned()
        assert batch.valid.is_pinned()


@on_gpu
@debug_mode
def test_a_row_is_taken_without_waiting_for_the_device(device: torch.device, tmp_path: Path) -> None:
    needs_real_gpu("gloo waits for the device")
    path = tmp_path / "metrics.jsonl"
    metrics_writer = MetricsWriter(MetricsFile(path, 0), [], io.StringIO())
    meters = Meters(1, 48, 10, 1, metrics_writer)
    loss = torch.ones((), dtype=torch.float64, device=device)
    norm = torch.full((), 2.0, device=device)
    # NCCL waits once, when it makes its communicator, and the driver when it pins memory.
    meters.train_row(1, 0.1, loss.clone(), norm)
    meters.sync()
    torch.cuda.synchronize()
    meters.drain(wait=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second or more that the loss comes behind
        meters.train_row(2, 0.1, loss, norm)
        assert [row["step"] for row in iter_rows(path)] == [1], "the device is not through yet"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    meters.drain(wait=False)
    row = list(iter_rows(path))[-1]
    assert row["step"] == 2
    assert (row["loss"], row["grad_norm"]) == (1.0, 2.0)
    metrics_writer.close()


@on_gpu
@debug_mode
def test_a_batch_reaches_the_device_without_waiting(device: torch.device, tmp_path: Path) -> None:
    experiment = load(write_experiment(tmp_path)).experiment
    with training_batches(build_source(experiment.data), experiment, Position(0), 1, 0, 1, device) as batches:
        _, micro_batches = next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [batch.to(device) for batch in micro_batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, there in zip(micro_batches, moved, strict=True):
        assert there.inputs.device == device
        assert torch.equal(there.inputs.cpu(), batch.inputs)


@on_gpu
@debug_mode
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_step_waits_for_the_device_nowhere(
    strategy: str, precision: str, device: torch.device, tmp_path: Path
) -> None:
    """With clipping and averages; of fp16's scaler the optimizer waits for whether gradients overflowed."""
    overrides = [*SHORT, EMA, CUDA, f"precision={precision}", f"parallel={{strategy: {strategy}}}"]
    config = load(write_experiment(tmp_path), overrides).experiment
    source = build_source(config.data)
    chosen = choose_precision(precision, device)
    arithmetic = BatchArithmetic.of(config.optimization, len(source.train), 1)
    context = RankContext(0, Degrees(), device, chosen, parallel=config.parallel)
    state = build(config, source.info, arithmetic, context)
    forward = TrainingForward.of(config, source.info, state, make_task(config, source.info), chosen, device)
    guard = Guard(config.optimization, state.model, norm_counts=True)
    state.wrapped.train()

    def train(step: int, micro_batches: list[Batch]) -> StepResult:
        return train_step(state, step, micro_batches, forward, guard, max_norm=1.0)

    with training_batches(source, config, Position(0), 6, 0, 1, device) as batches:
        for _ in range(3):  # loads kernels, makes communicators and the optimizer's state
            train(*next(batches))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            done = [train(*step) for step in batches]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(done) == 3 and all(each.loss.isfinite() and each.grad_norm is not None for each in done)


# --- refusals


@on_gpu
@debug_mode
def test_a_loss_is_looked_at_without_waiting_for_the_device(device: torch.device) -> None:
    watch = FiniteWatch()
    numbers = [torch.tensor(value, device=device) for value in (1.0, float("nan"), 2.0)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in numbers:
            watch.look(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert watch.has_seen


@on_gpu
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_loss_that_is_nan_is_dealt_with_as_the_file_says(policy: str, tmp_path: Path) -> None:
    text = EXPERIMENT.replace("parts:net", "parts:poisoned").replace(
        ", augment: {hflip: 0.5, crop_padding: 2}", ""
    )
    experiment = write_experiment(tmp_path, text)
    words = ("--local", "--devices", "1", CUDA, f"optimization.on_non_finite={policy}")
    done = hpc_train("submit", experiment, *words, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    assert done.code == (1 if policy == "stop" else 0), done.err
    for checkpoint in committed(only_run(tmp_path)):
        shards = [load_file(path) for path in checkpoint.folder.glob("*.safetensors")]
        assert all(bool(tensor.isfinite().all()) for shard in shards for tensor in shard.values())


@on_gpu
def test_an_asynchronous_save_waits_for_nothing_and_has_the_step_it_began_at(
    device: torch.device, tmp_path: Path
) -> None:
    """The copies run on a stream of their own; what changes the weights afterwards comes after them."""
    run = RunPaths(tmp_path / "run")
    (run.attempt(1).folder).mkdir(parents=True)
    layers = [nn.Linear(2048, 2048, device=device) for _ in range(8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    strategy = DDPStrategy(RankContext(0, Degrees(), device, choose_precision("fp32", device)))
    strategy.place(model, [])
    state, checkpointer = TrainingState(model, optimizer), Checkpointer(run, 1, strategy)
    inputs = torch.randn(256, 2048, device=device)
    model(inputs).square().mean().backward()
    optimizer.step()
    checkpointer.reserve(state)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    checkpointer.begin(state, 1, {})
    model(inputs).square().mean().backward()
    checkpointer.wait_staged()
    optimizer.step()
    save = checkpointer.finish()
    assert save is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpointer.load_newest(state) is not None
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(ours, theirs)


SAVES_ON_ITS_OWN_GPU = """
import threading
import torch
from hpc_train.training.checkpoint.staging import Staging
torch.cuda.set_device(1)
sources = {"weight": torch.ones(3, device="cuda")}
staging = Staging(sources)
staging.begin(sources, ())
writing = threading.Thread(target=staging.copy)
writing.start()
writing.join()
collecting = threading.Thread(target=lambda made: made.clear(), args=([staging],))
del staging
collecting.start()
collecting.join()
print([torch._C._cuda_hasPrimaryContext(number) for number in range(2)])
"""


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none here")
def test_a_save_makes_no_context_on_the_gpu_of_another_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVES_ON_ITS_OWN_GPU],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    )
    assert done.stdout.strip() == "[False, True]"


@on_gpu
def test_the_node_proves_its_gpu(device: torch.device, tmp_path: Path) -> None:
    node_check.check(RankFacts(), device, AttemptPaths(tmp_path), "here")


def test_results_are_kept_by_device_and_versions() -> None:
    here, passed, failed = {"device": "H100"}, {"outcome": "passed"}, {"outcome": "failed"}
    first = merged({}, here, {"b": failed, "a": passed}, "monday")
    assert first == {"date": "monday", "device": "H100", "tests": {"a": passed, "b": failed}}
    assert merged(first, here, {"b": passed}, "tuesday")["tests"] == {"a": passed, "b": passed}
    assert merged(first, {"device": "H200"}, {"b": passed}, "tuesday")["tests"] == {"b": passed}


def test_bf16_is_refused_on_a_gpu_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def is_supported(*, including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return False

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(BadFileError, match=r"precision: bf16 is not supported by Tesla V100; write fp16"):
        choose_precision("bf16", torch.device("cuda"))
    assert asked == [False], "emulated bf16 is slower than fp32"


# --- compile modes and activation checkpointing


@on_gpu
@pytest.mark.parametrize("scope", ["blocks", "model"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_train_as_eager_does_over_several_micro_batches(
    mode: str, scope: str, on_cpu: RunPaths, tmp_path: Path
) -> None:
    paths = submit_on_gpu(tmp_path, *SHORT, SGD, f"compile={{mode: {mode}, scope: {scope}}}")
    assert_losses_are_close(paths, on_cpu, 1e-3)


@on_gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("setting", ["blocks", "every 2", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_activations_computed_again_change_nothing(
    strategy: str, setting: str, compiled: str, vit_on_cpu: RunPaths, tmp_path: Path
) -> None:
    overrides = (f"activation_checkpointing={setting}", f"parallel.strategy={strategy}")
    paths = submit_on_gpu(tmp_path, *VIT_SHORT, EMA, *overrides, f"compile={compiled}", text=VIT)
    assert_losses_are_close(paths, vit_on_cpu, 1e-3)


# --- micro_batch_size: auto


@on_gpu
@pytest.mark.alone
def test_the_largest_micro_batch_that_fits_is_found(tmp_path: Path) -> None:
    """Half of the batch takes four fifths of the memory there is, all of it more than that."""
    free, _ = torch.cuda.mem_get_info()
    model = f'model={{name: "tests.gpu.parts:hungry", args: {{sample_bytes: {free // 30}}}}}'
    paths = submit_on_gpu(tmp_path, *SHORT[:3], SGD, model, "optimization.micro_batch_size=auto")
    found = kept(paths)
    assert found is not None and found.size == 24 and found.too_large == 48
    alone = submit_on_gpu(
        tmp_path / "number", *SHORT[:3], SGD, model, "optimization.micro_batch_size=24", "deterministic=true"
    )
    assert_losses_are_close(paths, alone, 1e-4)


@on_gpu
def test_a_session_restores_weights_and_generator_of_the_gpu(tmp_path: Path) -> None:
    model, generator = nn.Linear(2, 2).cuda(), torch.cuda.default_generators[0]
    staged(1, {"model": model}, 0)(tmp_path)
    weights, state = model.weight.tolist(), generator.get_state()
    torch.rand(3, device="cuda")
    nn.init.zeros_(model.weight)
    assert restore(tmp_path, {"model": model}, 0, 1) == 1
    assert model.weight.tolist() == weights and torch.equal(generator.get_state(), state)
