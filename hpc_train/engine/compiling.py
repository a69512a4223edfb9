"""``compile:`` of the file: torch.compile in place, before the strategy places the model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hpc_train.config.training_sections import CompileConfig
from hpc_train.errors import BadFileError, UserError

#: Recompilations that one block may cause beyond its first: training and evaluation, with and without
#: gradients. Assumed.
_VARIANTS = 4

_log = logging.getLogger(__name__)


def compile_model(model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig) -> None:
    """Compile ``blocks``, or the whole model, in place; the work is done at the first forward.

    In place, because a wrapper would change names and hide the hooks of ``fully_shard``.
    """
    if not config.enabled:
        return
    if config.scope == "blocks" and not blocks:
        _log.warning("compile.scope: the model has no repeated blocks; compiling it whole")
    targets = list(blocks) if config.scope == "blocks" and blocks else [model]
    _allow_recompiles(len(targets))
    for target in targets:
        target.compile(mode=config.mode, dynamic=config.dynamic, fullgraph=config.fullgraph)


def _allow_recompiles(num_modules: int) -> None:
    """Let blocks that differ (in shape, stride, drop rate) each have their code.

    All blocks share one code object, and dynamo gives up on that after 8 versions.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS * num_modules + 8)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)


def compile_error(error: BaseException) -> UserError | None:
    """Return what to tell the user if ``error`` comes from torch.compile, else None."""
    for cause in _causes(error):
        if not _is_compilers(cause):
            continue
        first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
        return BadFileError(
            f"compile: torch.compile failed: {type(cause).__name__}: {first_line}; {_fix(cause)}"
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_compilers(error: BaseException) -> bool:
    """Tell whether dynamo or inductor raised it; who never compiled has not imported them."""
    families = (("torch._dynamo.exc", "TorchDynamoException"), ("torch._inductor.exc", "CppCompileError"))
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in families]
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in kinds)


def _fix(error: BaseException) -> str:
    if "InvalidCxxCompiler" in f"{type(error).__name__} {error}":
        return (
            "no C++ compiler was found: load a module with one (environment.modules), or write compile: false"
        )
    if "fullgraph" in str(error) or type(error).__name__ == "Unsupported":
        return "write {fullgraph: false}, which goes on in Python where the compiler can't, or compile: false"
    return "write {scope: blocks} if it is not, or compile: false"
