"""Private names of torch, submitit and multiprocessing that the package relies on: a canary for new versions.

A public interface is missing for each of them. When a version renames one, the first tests fail and say which
module to change; the last fails when a module begins to use another one.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.queues
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._guards
import torch._inductor.config
import torch.distributed._tools.fake_collectives
from submitit import SlurmExecutor
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.tensor import placement_types
from torch.nn.modules import batchnorm
from torch.testing._internal.distributed import fake_pg
from torch.utils.data import dataloader

PACKAGE = Path(__file__).parents[1] / "hpc_train"
_ITERATOR = dataloader._MultiProcessingDataLoaderIter
_SPEC = find_spec("lightning")
assert _SPEC is not None and _SPEC.origin is not None
#: Its source: an import sets a variable with which tests can't fork ranks any more.
_LIGHTNING = Path(_SPEC.origin).parent / "pytorch"
_EPOCH_LOOP = _LIGHTNING / "loops" / "training_epoch_loop.py"
#: Owner → names that it must have, and the module that relies on them.
NAMES: list[tuple[Any, str, str]] = [
    (SlurmExecutor, "_make_submission_file_text _submitit_command_str", "launchers/slurm/script"),
    (torch, "_C _dynamo _functorch _guards", "training/distributed, training/health, training/compiling"),
    (torch, "_foreach_norm _foreach_mul_", "training/strategies/pieces"),
    (torch, "_foreach_zero_ _foreach_copy_", "training/strategies/batchnorm"),
    (torch, "_foreach_lerp_", "training/train_state"),
    (
        torch.utils,
        "_python_dispatch _pytree",
        "training/flops, training/live_memory, training/memory_prediction",
    ),
    (torch._C, "_distributed_c10d", "training/distributed/rendezvous, training/health/watchdog"),
    (
        _distributed_c10d,
        "HashStore Store TCPStore",
        "training/distributed/rendezvous, training/health/watchdog",
    ),
    (_distributed_c10d.Backend, "_get_sequence_number_for_group", "training/health/watchdog"),
    (distributed_c10d, "_world", "training/health/watchdog"),
    (distributed_c10d.ProcessGroup, "_get_backend", "training/health/watchdog"),
    (torch._guards, "TracingContext", "training/activation_checkpointing"),
    (torch._dynamo.config, "suppress_errors", "training/compiling"),
    (torch.ops.aten, "_scaled_mm _scaled_dot_product_flash_attention", "training/activation_checkpointing"),
    (torch.ops.aten.mm.default, "_schema", "training/activation_checkpointing"),
    (torch.amp.GradScaler, "_found_inf_per_device", "training/optimization"),
    (placement_types, "_StridedShard", "training/strategies/pieces"),
    (batchnorm, "_BatchNorm", "training/strategies/batchnorm"),
    (torch.fx.Tracer(), "_autowrap_search", "training/models/tracing"),
    (
        nn.Module(),
        "_apply _buffers _modules _parameters _non_persistent_buffers_set",
        "training/strategies/buffers",
    ),
    (nn.Module(), "_forward_hooks _forward_pre_hooks", "training/models/splitting"),
    (nn.Module(), "_compiled_call_impl", "training/strategies/pipeline"),
    (_ITERATOR, "_shutdown_workers _try_get_data", "training/datasets/workers"),
    (torch, "_subclasses", "training/strategies/pieces, training/memory_prediction"),
    (
        torch._subclasses.fake_tensor,
        "DataDependentOutputException DynamicOutputShapeException",
        "training/predicted_runs",
    ),
    (torch._subclasses.fake_tensor, "unset_fake_temporarily FakeTensorMode", "training/memory_prediction"),
    (torch.UntypedStorage(0), "_cdata", "training/live_memory"),
    (torch.UntypedStorage, "_new_shared_fd_cpu", "training/datasets/transport"),
    (torch.distributed._tools, "fake_collectives", "training/memory_prediction"),
    (torch.testing, "_internal", "training/memory_prediction"),
    (torch.distributed, "_tools", "training/memory_prediction"),
    (fake_pg, "FakeStore", "training/memory_prediction"),
]
#: Attributes that instances get in ``__init__``, and names that only source code holds.
IN_SOURCE: list[tuple[Any, str, str]] = [
    (_EPOCH_LOOP, "_batches_that_stepped _should_accumulate _is_training_done", "session/lightning"),
    (_EPOCH_LOOP, "_should_check_val_fx _num_ready_batches_reached", "session/lightning"),
    (_LIGHTNING / "loops" / "fit_loop.py", "_data_fetcher", "session/lightning"),
    (_LIGHTNING / "trainer" / "trainer.py", "_logger_connector", "session/lightning"),
    (_ITERATOR, "_workers _task_info _rcvd_idx _send_idx _tasks_outstanding", "training/datasets/workers"),
    (_ITERATOR, "_pin_memory_thread _worker_result_queue", "training/datasets/workers"),
    (
        multiprocessing.queues.Queue,
        "_writer _wlock _sem _opid _thread",
        "training/datasets/workers, training/datasets/transport",
    ),
    (multiprocessing.queues.Queue, "_on_queue_feeder_error", "training/datasets/transport"),
    (multiprocessing.popen_fork.Popen, "_launch", "training/distributed/forking"),
    (multiprocessing.context.ForkProcess, "_Popen", "training/distributed/forking"),
    (torch._dynamo.OptimizedModule, "_orig_mod", "training/checkpoint/state"),
    (nn.Module, "_extra_state", "training/checkpoint/state"),
    (torch.fx.Tracer, "_tensor_constant", "training/models/tracing"),
]
#: Used where they are there, with a public name or nothing in their place.
OPTIONAL = {
    "_dump_nccl_trace_json", "_set_pg_timeout", "_labels", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_attn_implementation",
}  # fmt: skip
#: Documented in spite of their names.
DOCUMENTED = {"_exit", "_getframe", "_replace", "_asdict"}


def _advice(name: str, owner: Any, user: str) -> str:
    return (
        f"{owner!r} has no {name} (torch {torch.__version__}), and hpc_train/{user} relies on it. Find "
        "what replaced it, support both versions there and change this list; or bound the version in "
        "pyproject.toml"
    )


@pytest.mark.parametrize(("owner", "names", "user"), NAMES)
def test_private_names_are_there(owner: Any, names: str, user: str) -> None:
    for name in names.split():
        assert hasattr(owner, name), _advice(name, owner, user)


@pytest.mark.parametrize(("owner", "names", "user"), IN_SOURCE)
def test_private_names_are_in_the_source(owner: Any, names: str, user: str) -> None:
    source = owner.read_text() if isinstance(owner, Path) else inspect.getsource(owner)
    for name in names.split():
        assert name in source, _advice(name, owner, user)


def _trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def _own(node: ast.AST) -> set[str]:
    """Return the name that a statement of the package itself gives to something."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name, ctx=ast.Store()):
            return {name}
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            return {name}
    return set()


def _used(node: ast.AST) -> set[str]:
    match node:
        case ast.Attribute(attr=name):
            return {name}
        case ast.ImportFrom(module=module, names=names):
            return {*(module or "").split("."), *(alias.name for alias in names)}
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return {name}
    return set()


def test_every_private_name_of_others_is_listed() -> None:
    trees = _trees()
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _own(node)}
    listed = {name for _, names, _ in [*NAMES, *IN_SOURCE] for name in names.split()} | OPTIONAL | DOCUMENTED
    for path, tree in trees.items():
        used = {name for node in ast.walk(tree) for name in _used(node)}
        private = {name for name in used if name.startswith("_") and not name.startswith("__")} - own - {"_"}
        assert private <= listed, f"hpc_train/{path}: use a public name, or list {private - listed} here"
