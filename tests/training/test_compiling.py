from __future__ import annotations

import gc
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import ExitCode
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.trust import UntrustedError
from hpc_train.training.compiling import begin_forward, compile_error, compile_model, first_step, watched
from hpc_train.training.models.blocks import find_blocks
from tests import warm

# torch asks a tensor between two compiled blocks for .grad and hides the warning, unless it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

_REAL_COMPILE = torch.compile
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).relu()


def model(width: int = 4, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Sequential(*(Block(width) for _ in range(depth))))


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count from nothing, and trace without the C++ compiler: what is compiled is asked, not how."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, mode=None, **keys: real(*args, backend="eager", **keys)
    )
    yield
    torch._dynamo.config.suppress_errors = False
    torch._functorch.config.force_non_lazy_backward_lowering = False
    torch._dynamo.reset()
    log = logging.getLogger("torch._dynamo.convert_frame")
    for each in list(log.filters):
        log.removeFilter(each)


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_cache_of_code_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv(variable, str(shared))
    with pytest.raises(UntrustedError, match=r"shared: group or others may write it.*`chmod go-w"):
        compile_model(model(), [], CompileConfig(), CPU)
    monkeypatch.setenv(variable, str(shared / "of-mine"))
    compile_model(model(), [], CompileConfig(), CPU)
    assert (shared / "of-mine").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(variable, str(shared))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))  # which is checked as a whole before ranks start
    compile_model(model(), [], CompileConfig(), CPU)


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("config", "graphs", "is_whole"),
    [
        (CompileConfig(), 1, False),  # equal blocks once, and nothing besides
        (CompileConfig(scope="model", fullgraph=True), 1, True),
        (CompileConfig(enabled=False), 0, False),
    ],
    ids=["blocks", "model", "off"],
)
def test_the_scope_is_compiled_and_names_stay(config: CompileConfig, graphs: int, is_whole: bool) -> None:
    target = model()
    names, expected = list(target.state_dict()), target(torch.ones(1, 2))
    compile_model(target, find_blocks(target), config, CPU)
    torch.testing.assert_close(target(torch.ones(1, 2)), expected)
    assert compiled_graphs() == graphs
    assert (target._compiled_call_impl is not None) == is_whole
    assert list(target.state_dict()) == names


def test_each_graph_is_reported_while_it_is_compiled() -> None:
    target, seen = model(), list[int]()
    config = CompileConfig(scope="model")
    compile_model(target, find_blocks(target), config, CPU)
    with watched(config, lambda graph, seconds: seen.append(graph)) as compilation:
        target(torch.ones(1, 2))
        assert (seen, compilation.begun) == ([1, 0], 1)
        assert compilation.seconds > 0
        target(torch.ones(1, 2))  # compiled already
        target(torch.ones(3, 2, dtype=torch.float32)[:, :])
        assert seen == [1, 0, 2, 0]
    torch._dynamo.reset()
    target(torch.ones(1, 2))
    assert seen == [1, 0, 2, 0], "nobody watches any more"


def test_without_compilation_nothing_is_watched() -> None:
    with watched(CompileConfig(enabled=False), lambda graph, seconds: None) as compilation:
        assert not torch._dynamo.callback.callback_handler.start_callbacks
    assert compilation.counts() == {"graphs": 0, "cached_graphs": 0}


def test_without_blocks_the_whole_model_is_compiled_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = nn.Sequential(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        compile_model(target, [], CompileConfig(), CPU)
    assert target._compiled_call_impl is not None
    assert "no repeated blocks" in caplog.text


@pytest.mark.slow
def test_more_kinds_of_blocks_than_dynamos_limit_are_all_compiled() -> None:
    blocks = [Block(width) for width in range(2, 14)]
    compile_model(nn.ModuleList(blocks), blocks, CompileConfig(dynamic=False), CPU)
    for width, block in enumerate(blocks, start=2):
        block(torch.ones(1, width))
    assert compiled_graphs() == 12


class _Breaks(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inputs


def test_a_graph_break_under_fullgraph_says_what_to_write() -> None:
    target = _Breaks()
    compile_model(target, [], CompileConfig(fullgraph=True), CPU)
    with pytest.raises(Exception) as caught:
        target(torch.ones(1))
    error = compile_error(caught.value)
    assert error is not None and error.exit_code == ExitCode.BAD_FILE
    assert str(error).startswith("compile: torch.compile failed: ") and "fullgraph: false" in str(error)


def told(error: Exception) -> str:
    return str(compile_error(error))


def inductor_error(cause: Exception) -> Exception:
    from torch._inductor.exc import InductorError

    return InductorError(cause, None)


def test_a_missing_compiler_is_named_through_what_wraps_it_and_at_a_kernels_first_launch() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    wrapped = RuntimeError("forward failed")
    wrapped.__cause__ = inductor_error(InvalidCxxCompiler())
    assert "no C++ compiler was found" in told(wrapped)
    words = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    for error in (words, inductor_error(words)):
        assert "no C compiler was found: load a module with one (environment.modules)" in told(error)
        assert "micro_batch_size" not in told(error)


def test_other_failures_say_what_to_try() -> None:
    assert told(inductor_error(RuntimeError("no such tile"))).endswith(
        "write {scope: blocks} if it is not, a smaller optimization.micro_batch_size, {fallback: true}, "
        "which continues without where it fails, or compile: false"
    )
    out_of_memory = inductor_error(RuntimeError("CUDA out of memory"))
    assert "write a smaller optimization.micro_batch_size" in told(out_of_memory)
    without_locks = inductor_error(NotImplementedError("FileSystem does not support flock"))
    assert "TORCHINDUCTOR_CACHE_DIR" in told(without_locks)
    assert compile_error(RuntimeError("shapes do not match")) is None, "not the compiler's"


# --- CUDA graphs


def test_a_cpu_has_no_cuda_graphs_and_that_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    target = model()
    with caplog.at_level(logging.WARNING):
        compile_model(target, find_blocks(target), CompileConfig(mode="reduce-overhead"), CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "compile.mode: reduce-overhead is CUDA graphs, which cpu does not have: as default"
    ]
    assert all(not parameter._backward_hooks for parameter in target.parameters())


@pytest.mark.parametrize(
    ("config", "device", "count"),
    [
        (CompileConfig(mode="reduce-overhead"), CUDA, 1),
        (CompileConfig(mode="max-autotune"), CUDA, 1),
        (CompileConfig(mode="reduce-overhead"), CPU, 0),
        (CompileConfig(mode="reduce-overhead", enabled=False), CUDA, 0),
        (CompileConfig(), CUDA, 0),
    ],
)
def test_graphs_are_notified_where_a_forward_begins(
    config: CompileConfig, device: torch.device, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append(None))
    begin_forward(config, device)
    assert len(told) == count


class _Owning(torch.autograd.Function):
    """An operation whose gradient is in memory of its own, as a CUDA graph's does."""

    memory = torch.ones(3)

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _Owning.memory


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        loss: Tensor = _Owning.apply(self.values)
        return loss


@pytest.fixture
def graph_memory() -> Iterator[None]:
    """Let autograd take ``_Owning.memory`` as it takes a CUDA graph's results: without a copy."""
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(_Owning.memory)
    yield
    torch._C._remove_cached_tensor(_Owning.memory)
    torch._C._set_cached_tensors_enabled(False)


@pytest.mark.usefixtures("graph_memory")
@pytest.mark.parametrize(("mode", "is_own"), [("default", False), ("reduce-overhead", True)])
def test_gradients_are_copied_out_of_a_graphs_memory(mode: Any, is_own: bool) -> None:
    target = _Graph()
    compile_model(target, [], CompileConfig(mode=mode), CUDA)
    target.double().float()  # as a strategy's placing does
    target.forward().backward()
    assert target.values.grad is not None
    assert (target.values.grad.data_ptr() != _Owning.memory.data_ptr()) == is_own


# --- what fails


def backend(monkeypatch: pytest.MonkeyPatch, *, forward: bool = True, backward: bool = True) -> None:
    """Compile by a compiler that fails at the forward's code, or at the backward's."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(works: bool) -> Callable[..., Any]:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            if not works:
                raise RuntimeError("no room for this kernel")
            from functorch.compile import make_boxed_func

            return make_boxed_func(graph.forward)

        return compile_graph

    made = aot_autograd(fw_compiler=compiler(forward), bw_compiler=compiler(backward))
    monkeypatch.setattr(
        torch, "compile", lambda *args, mode=None, **keys: _REAL_COMPILE(*args, backend=made, **keys)
    )


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_with_fallback_training_continues_with_one_warning(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend(monkeypatch, **{part: False})
    torch.manual_seed(0)
    target = model()
    plain = model()
    plain.load_state_dict(target.state_dict())
    with caplog.at_level(logging.WARNING):
        compile_model(target, [*find_blocks(target), target[0]], CompileConfig(fallback=True), CPU)
        target(torch.ones(1, 2)).sum().backward()
    plain(torch.ones(1, 2)).sum().backward()
    for name, value in target.named_parameters():
        assert torch.equal(value.grad, plain.get_parameter(name).grad), name
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("compile.fallback: torch.compile failed, continuing without it there: ")
    assert "no room for this kernel" in said[0]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_without_fallback_the_failure_is_raised(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, **{part: False})
    target = model()
    compile_model(target, find_blocks(target), CompileConfig(), CPU)
    with pytest.raises(Exception) as caught:
        target(torch.ones(1, 2)).sum().backward()
    assert "no room for this kernel" in str(caught.value)


_TRAINS = """
import sys
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.compiling import compile_model

class Model(nn.Sequential):
    # Code of its own: torch 2.11 compiles no module that is torch's alone.
    def forward(self, inputs):
        return super().forward(inputs)

torch._inductor.config.cpp.vec_isa_ok = True  # compile no program that tries AVX
torch.manual_seed(0)
model = Model(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
expected = model(torch.ones(2, 4))
if sys.argv[1] in ("blocks", "selective"):
    checkpoint_activations([model], sys.argv[1])
compile_model(model, [], CompileConfig(fallback=sys.argv[1] == "fallback"), torch.device("cpu"))
found = model(torch.ones(2, 4))
torch.testing.assert_close(found, expected)
found.sum().backward()
print(
    *(counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss")),
    *(counters["aot_autograd"][f"autograd_cache_{how}"] for how in ("hit", "miss", "bypass")),
)
"""


def training(cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process that compiles with torch's real compiler, as a rank does."""
    return warm.start_script(
        _TRAINS,
        *(arguments or ("plain",)),
        env=os.environ
        | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        | {"OMP_NUM_THREADS": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plain", pytest.param("blocks", marks=pytest.mark.soak), "selective"])
def test_ranks_share_what_they_compiled_and_so_does_the_next_attempt(tmp_path: Path, setting: str) -> None:
    """Kernels, and what was traced for them; also where blocks compute again in backward."""
    first = [training(tmp_path, setting) for _ in range(2)]
    outputs = [process.communicate() for process in first]
    assert [process.returncode for process in first] == [0, 0], outputs
    assert not any("WARN" in errors or "pickle" in errors for _, errors in outputs), outputs
    again = training(tmp_path, setting)
    output, errors = again.communicate()
    assert again.returncode == 0, errors
    assert output.split() == ["2", "0", "1", "0", "0"], "forward and backward, traced once"


@pytest.mark.slow
def test_a_broken_cxx_compiler_ends_the_run_unless_fallback_is_set(tmp_path: Path) -> None:
    plain = training(tmp_path / "plain", CXX="/bin/false")
    fallback = training(tmp_path / "fallback", "fallback", CXX="/bin/false")
    _, errors = plain.communicate()
    assert plain.returncode == 1 and "InductorError" in errors
    _, errors = fallback.communicate()
    assert fallback.returncode == 0, errors
    assert errors.count("compile.fallback: torch.compile failed, continuing without it") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize(("compiles", "collects_before"), [(True, True), (False, True), (True, False)])
def test_no_garbage_is_collected_while_torch_compiles(compiles: bool, collects_before: bool) -> None:
    if not collects_before:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), first_step(CompileConfig(enabled=compiles)):
            during = gc.isenabled()
            raise ZeroDivisionError
        assert during == (collects_before and not compiles)
        assert gc.isenabled() == collects_before
    finally:
        gc.enable()
