from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.training_sections import CompileConfig
from hpc_train.engine.compiling import compile_error, compile_model
from hpc_train.errors import ExitCode
from hpc_train.models.blocks import find_blocks

# torch asks a tensor between two compiled blocks for .grad and hides the warning, unless it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


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
    torch._dynamo.reset()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_equal_blocks_are_compiled_once_and_the_rest_is_not() -> None:
    target = model()
    expected = target(torch.ones(1, 2))
    compile_model(target, find_blocks(target), CompileConfig())
    torch.testing.assert_close(target(torch.ones(1, 2)), expected)
    assert compiled_graphs() == 1
    assert target._compiled_call_impl is None


def test_the_whole_model_is_one_graph() -> None:
    target = model()
    compile_model(target, find_blocks(target), CompileConfig(scope="model", fullgraph=True))
    target(torch.ones(1, 2))
    assert compiled_graphs() == 1
    assert target._compiled_call_impl is not None


def test_names_of_parameters_stay() -> None:
    target = model()
    names = list(target.state_dict())
    compile_model(target, find_blocks(target), CompileConfig())
    assert list(target.state_dict()) == names


def test_off_compiles_nothing() -> None:
    target = model()
    compile_model(target, find_blocks(target), CompileConfig(enabled=False))
    target(torch.ones(1, 2))
    assert compiled_graphs() == 0


def test_without_blocks_the_whole_model_is_compiled_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    target = nn.Sequential(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        compile_model(target, [], CompileConfig())
    assert target._compiled_call_impl is not None
    assert "no repeated blocks" in caplog.text


def test_more_kinds_of_blocks_than_dynamos_limit_are_all_compiled() -> None:
    blocks = [Block(width) for width in range(2, 14)]
    compile_model(nn.ModuleList(blocks), blocks, CompileConfig(dynamic=False))
    for width, block in enumerate(blocks, start=2):
        block(torch.ones(1, width))
    assert compiled_graphs() == 12


class _Breaks(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inputs


def test_a_graph_break_under_fullgraph_says_what_to_write() -> None:
    target = _Breaks()
    compile_model(target, [], CompileConfig(fullgraph=True))
    with pytest.raises(Exception) as caught:
        target(torch.ones(1))
    told = compile_error(caught.value)
    assert told is not None and told.exit_code == ExitCode.BAD_FILE
    assert str(told).startswith("compile: torch.compile failed: ")
    assert "fullgraph: false" in str(told)


def test_a_missing_compiler_is_named_through_what_wraps_it() -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        try:
            raise InductorError(InvalidCxxCompiler(), None)
        except Exception as error:
            raise RuntimeError("forward failed") from error
    except RuntimeError as error:
        told = compile_error(error)
    assert told is not None and "no C++ compiler was found" in str(told)


def test_other_errors_are_not_the_compilers() -> None:
    assert compile_error(RuntimeError("shapes do not match")) is None
