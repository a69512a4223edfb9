"""``compile:`` of the file: torch.compile in place, before the strategy places the model.

Compiled code is in the run folder's ``cache/``: the launchers say so in the environment. All ranks and the
next attempts execute what is there.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_train.config.training_sections import CompileConfig
from hpc_train.errors import BadFileError, UserError
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.storage_errors import named_errors
from hpc_train.run.trust import check_own

#: Recompilations that one block may cause beyond its first: training and evaluation, with and without
#: gradients. Assumed.
_VARIANTS = 4
#: Modes in which forward and backward are CUDA graphs, whose results lie where the next replay puts its own.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")

#: What Triton says, as a plain RuntimeError, at the compilation or at a kernel's first launch.
_NO_C_COMPILER = "Failed to find C compiler"

_log = logging.getLogger(__name__)


def compile_model(
    model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device
) -> None:
    """Compile ``blocks``, or the whole model, in place; the work is done at the first forward.

    In place, because a wrapper would change names and hide the hooks of ``fully_shard``.
    """
    if not config.enabled:
        return
    _check_caches()
    if config.scope == "blocks" and not blocks:
        _log.warning("compile.scope: the model has no repeated blocks; compiling it whole")
    if config.mode == "reduce-overhead" and device.type != "cuda":
        _log.warning(
            "compile.mode: reduce-overhead is CUDA graphs, which %s does not have: as default", device.type
        )
    targets = list(blocks) if config.scope == "blocks" and blocks else [model]
    _allow_recompiles(len(targets))
    if config.fallback:
        _go_on_without()
    for target in targets:
        target.compile(mode=config.mode, dynamic=config.dynamic, fullgraph=config.fullgraph)
        if _replays_graphs(config, device):
            _own_gradients(target)


def _check_caches() -> None:
    """Raise UntrustedError if another user could have written the code that torch reads from its caches.

    That of the run folder is checked with it, before ranks start (``run.trust``).
    """
    own = os.environ.get(FOLDER_VARIABLE)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not os.environ.get(name):
            continue
        folder = Path(os.environ[name]).absolute()
        if own and folder.is_relative_to(own):
            continue
        with named_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder.resolve())


@contextmanager
def first_step(config: CompileConfig) -> Iterator[None]:
    """Run the step in which torch compiles, or reads its caches, without garbage collection.

    Both make many objects that stay, which each collection would look through again.
    """
    is_paused = config.enabled and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        yield
    finally:
        if is_paused:
            gc.enable()


@dataclass
class Compilation:
    """Counts the graphs that torch has compiled in this process, or read from its caches."""

    on_change: Callable[[int, float], None]
    #: Compilations that torch has begun: a graph's backward may be one of its own.
    begun: int = 0
    seconds: float = 0.0
    _began: float = 0.0

    def begin(self, *args: object) -> None:
        """Called by torch before a graph is compiled, from the thread that does it."""
        self.begun, self._began = self.begun + 1, time.monotonic()
        self.on_change(self.begun, self.seconds)

    def end(self, *args: object) -> None:
        """Called by torch after it."""
        self.seconds += time.monotonic() - self._began
        self.on_change(0, self.seconds)

    def counts(self) -> dict[str, int]:
        """Return the number of ``graphs``, each with its backward, and of ``cached_graphs`` among them."""
        if not self.begun:
            return {"graphs": 0, "cached_graphs": 0}
        counters = torch._dynamo.utils.counters["aot_autograd"]
        hit, miss, bypass = (counters[f"autograd_cache_{how}"] for how in ("hit", "miss", "bypass"))
        return {"graphs": hit + miss + bypass, "cached_graphs": hit}


@contextmanager
def watched(config: CompileConfig, on_change: Callable[[int, float], None]) -> Iterator[Compilation]:
    """Call ``on_change`` with the number of each graph that torch compiles, from 1, and with 0 after it; and
    with the seconds that all before have taken.
    """
    compilation = Compilation(on_change)
    with ExitStack() as stack:
        if config.enabled:
            handler = torch._dynamo.callback.callback_handler
            for call, calls in (
                (compilation.begin, handler.start_callbacks),
                (compilation.end, handler.end_callbacks),
            ):
                calls.append(call)
                stack.callback(_without, calls, call)
        yield compilation


def _without(calls: list[Any], call: Callable[..., None]) -> None:
    with suppress(ValueError):  # torch._dynamo.reset removes all
        calls.remove(call)


def begin_forward(config: CompileConfig, device: torch.device) -> None:
    """Called before each forward pass: what the one before it computed may be overwritten."""
    if _replays_graphs(config, device):
        torch.compiler.cudagraph_mark_step_begin()


def _replays_graphs(config: CompileConfig, device: torch.device) -> bool:
    return config.enabled and config.mode in _GRAPH_MODES and device.type == "cuda"


def _own_gradients(module: nn.Module) -> None:
    """Copy gradients out of CUDA graphs, which the next micro-batch's replay overwrites.

    Source: pytorch issue 169545.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.clone)


def _go_on_without() -> None:
    """Let each piece of code that the compiler fails at run as it is.

    Every rank decides for itself, with no agreement: collectives are issued by hooks outside of compiled
    code, or from within by the same operations, so that ranks of either kind meet. They differ in the
    rounding of their own micro-batches alone, since gradients are summed before weights change. Piece by
    piece, because when a later one fails an earlier one has changed buffers and drawn random numbers.
    """
    torch._dynamo.config.suppress_errors = True
    functorch = torch._functorch.config
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        # Compiled at the first backward, its failure could not be undone any more.
        functorch.force_non_lazy_backward_lowering = True
    log = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(each, _Failures) for each in log.filters):
        log.addFilter(_Failures())


class _Failures(logging.Filter):
    """Says the first failure in one line of ours instead of torch's hundred; the others are alike."""

    _is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno != logging.WARNING:
            return True
        if not self._is_said:
            self._is_said = True
            _log.warning(
                "compile.fallback: torch.compile failed, continuing without it there: %s",
                _in_words(error),
            )
        return False


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
        return BadFileError(f"compile: torch.compile failed: {_in_words(cause)}; {_fix(cause)}")
    return None


def _in_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # "backend='inductor' raised:" has what was raised in the line after it.
    words = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {words}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_compilers(error: BaseException) -> bool:
    """Tell whether dynamo, inductor or Triton raised it; who never compiled has not imported them."""
    if isinstance(error, RuntimeError) and _NO_C_COMPILER in str(error):
        return True
    families = (("torch._dynamo.exc", "TorchDynamoException"), ("torch._inductor.exc", "CppCompileError"))
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in families]
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in kinds)


def _fix(error: BaseException) -> str:
    if "InvalidCxxCompiler" in f"{type(error).__name__} {error}":
        return (
            "no C++ compiler was found: load a module with one (environment.modules), or write compile: false"
        )
    if _NO_C_COMPILER in str(error):
        return (
            "no C compiler was found: load a module with one (environment.modules), set CC to one, or write "
            "compile: false"
        )
    if "fullgraph" in str(error) or type(error).__name__ == "Unsupported":
        return "write {fullgraph: false}, which runs eagerly where the compiler can't, or compile: false"
    if "flock" in str(error):
        return (
            "set TORCHINDUCTOR_CACHE_DIR to a folder on a disk that has locks, like /tmp, or compile: false"
        )
    if "out of memory" in str(error).lower():
        return (
            "write a smaller optimization.micro_batch_size, {scope: blocks} if it is not, or compile: false"
        )
    return (
        "write {scope: blocks} if it is not, a smaller optimization.micro_batch_size, {fallback: true}, "
        "which continues without where it fails, or compile: false"
    )
