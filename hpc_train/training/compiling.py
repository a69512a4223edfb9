"""``compile:`` of the file: torch.compile in place, before the strategy places the model.

Compiled code is in the run folder's ``cache/``; the launchers set the environment variables for it. All ranks
and later attempts execute that code.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.run import processes, storage_errors, trust

#: Recompilations that one block may cause beyond its first: training and evaluation, with and without
#: gradients. Assumed.
_VARIANTS = 4
#: Modes in which forward and backward are CUDA graphs, whose results the next replay overwrites.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")

#: Message of a plain RuntimeError that Triton raises at compilation or at a kernel's first launch.
_NO_C_COMPILER = "Failed to find C compiler"

_log = logging.getLogger(__name__)


def compile_model(
    model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device
) -> None:
    """Compile ``blocks``, or the whole model, in place; torch compiles at the first forward.

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
            # Copy gradients out of CUDA graphs, which the next micro-batch's replay overwrites. Source:
            # pytorch issue 169545.
            for parameter in target.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(torch.clone)


def _check_caches() -> None:
    """Raise UntrustedError if another user could have written the code that torch reads from its caches.

    The run folder's cache is checked before ranks start (``run.trust``).
    """
    run_folder = os.environ.get(processes.FOLDER_VARIABLE)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not os.environ.get(name):
            continue
        folder = Path(os.environ[name]).absolute()
        if run_folder and folder.is_relative_to(run_folder):
            continue
        with storage_errors.named_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trust.check_own(folder.resolve())


@contextmanager
def first_step(config: CompileConfig) -> Iterator[None]:
    """Run the step in which torch compiles, or reads its caches, without garbage collection.

    Both allocate many long-lived objects, which each collection would traverse again.
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
    #: Compilations that torch has begun; a graph's backward may be a separate one.
    begun: int = 0
    seconds: float = 0.0
    _began: float = 0.0

    def begin(self, *args: object) -> None:
        """Called by torch before it compiles a graph, in the compiling thread."""
        self.begun, self._began = self.begun + 1, time.monotonic()
        self.on_change(self.begun, self.seconds)

    def end(self, *args: object) -> None:
        """Called by torch after it has compiled a graph."""
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
    """Call ``on_change`` with the number of each graph that torch compiles, from 1, and with 0 after it. The
    second argument is the total seconds of earlier compilations.
    """
    compilation = Compilation(on_change)
    if not config.enabled:
        yield compilation
        return
    handler = torch._dynamo.callback.callback_handler
    calls = (handler.start_callbacks, compilation.begin), (handler.end_callbacks, compilation.end)
    for callbacks, call in calls:
        callbacks.append(call)
    try:
        yield compilation
    finally:
        for callbacks, call in calls:
            with suppress(ValueError):  # torch._dynamo.reset removes all
                callbacks.remove(call)


def begin_forward(config: CompileConfig, device: torch.device) -> None:
    """Called before each forward pass: allow CUDA graphs to overwrite the previous results."""
    if _replays_graphs(config, device):
        torch.compiler.cudagraph_mark_step_begin()


def _replays_graphs(config: CompileConfig, device: torch.device) -> bool:
    return config.enabled and config.mode in _GRAPH_MODES and device.type == "cuda"


def _go_on_without() -> None:
    """Run each piece of code that fails to compile in eager mode.

    Every rank falls back independently, without agreement: collectives are issued by hooks outside compiled
    code, or inside it by the same operations, so compiled and eager ranks match. They differ only in the
    rounding of their own micro-batches, since gradients are reduced before weights change. The fallback is
    per piece because when a later one fails, an earlier one has changed buffers and drawn random numbers.
    """
    torch._dynamo.config.suppress_errors = True
    functorch = torch._functorch.config
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        # If backward were compiled lazily, its failure could not be undone.
        functorch.force_non_lazy_backward_lowering = True
    log = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(item, _Failures) for item in log.filters):
        log.addFilter(_Failures())


class _Failures(logging.Filter):
    """Logs the first failure in one line instead of torch's hundred; drops the others, which are alike."""

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
    """Raise dynamo's recompile limit for blocks that differ in shape, stride or drop rate.

    All blocks share one code object, and dynamo gives up after 8 versions of it.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS * num_modules + 8)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)


def compile_error(error: BaseException) -> UserError | None:
    """Return the error to show the user if ``error`` comes from torch.compile, else None."""
    for cause in _causes(error):
        if not _is_compilers(cause):
            continue
        return BadFileError(f"compile: torch.compile failed: {_in_words(cause)}; {_fix(cause)}")
    return None


def _in_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # After "backend='inductor' raised:" the error is in the next line.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_compilers(error: BaseException) -> bool:
    """Return True if dynamo, inductor or Triton raised it. They are imported only if code was compiled."""
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
