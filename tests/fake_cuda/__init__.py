"""A CUDA device without a GPU: its memory is host memory, and the CPU's kernels compute its operators.

``runtime.cpp`` replaces the CUDA runtime by LD_PRELOAD, ``operators.cpp`` the kernels of torch's CUDA
operators. Everything between them is torch's own: caching allocator, streams, events, pinned memory,
autocast, DDP, FSDP2, ``is_cuda``, the device ``cuda:0``. Not there: NCCL (ranks use gloo), cuDNN, fused
attention, CUDA graphs, Triton and so ``torch.compile``, profiles of the device, and all that takes time.

    python -m tests.fake_cuda COMMAND …    runs a command, such as python -m pytest tests/gpu, with one device

Variables of the device: FAKE_CUDA_MIB (4096), FAKE_CUDA_OTHERS_MIB (used by other processes), FAKE_CUDA_NAME,
FAKE_CUDA_MAJOR (9). Files that exist while it fails, hangs or is busy: FAKE_CUDA_FAILS (every call returns
cudaErrorECCUncorrectable), FAKE_CUDA_HANGS (nothing completes), FAKE_CUDA_BUSY (``set_device`` fails). A node
of Slurm has a device less while FAKE_CUDA_LOST with ``-`` and its name appended is a file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from tests import warm

#: Read by ``distributed.process_group`` and ``launchers.local``: ranks may share a GPU over gloo.
BACKEND = "HPC_TRAIN_TEST_CUDA_BACKEND"
_FOLDER = Path(__file__).parent
_SOURCES = (_FOLDER / "runtime.cpp", _FOLDER / "operators.cpp")
_OPTIONS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")
#: Preloaded into every program, whose own libstdc++ may be another. Were the names of this one visible, an
#: exception that gloo throws again would abort the process.
_HIDDEN = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_ALONE = (*_HIDDEN, "-Wl,-soname,libcuda.so.1", "-ldl")


def is_here() -> bool:
    """Return True if this process has the stand-in."""
    return "fake-cuda" in os.environ.get("LD_PRELOAD", "")


def why_not() -> str:
    """Return why there can be no stand-in here; empty if there can."""
    if shutil.which("g++") is None:
        return "no C++ compiler: g++ is not installed"
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is a build without CUDA"
    return "" if _cuda_headers().exists() else "triton, which has CUDA's headers, is not installed"


def environment(devices: int = 1) -> dict[str, str]:
    """Return the variables of a process that has the devices, and of all that it starts."""
    visible = ",".join(map(str, range(devices)))
    return {
        "LD_PRELOAD": str(library()),
        "FAKE_CUDA_DEVICES": str(devices),
        "CUDA_VISIBLE_DEVICES": visible,  # there is no nvidia-smi that counts
        BACKEND: "gloo",
    }


def forking() -> AbstractContextManager[None]:
    """A while in which ranks and commands with the stand-in are forked; nothing where there can be none."""
    return nullcontext() if why_not() else warm.server_with(LD_PRELOAD=str(library()))


def library() -> Path:
    """Return runtime.so, which loads operators.so beside it; built at first use: ten seconds of CPU time."""
    hashed = hashlib.sha256(
        repr((_OPTIONS, _ALONE, _torch(), (_torch() / "version.py").read_text())).encode()
    )
    for source in _SOURCES:
        hashed.update(source.read_bytes())
    own = Path(tempfile.gettempdir()) / f"hpc-train-fake-cuda-{os.geteuid()}"
    built = own / hashed.hexdigest()[:16]
    if not built.exists():
        own.mkdir(mode=0o700, exist_ok=True)
        assert own.stat().st_uid == os.geteuid(), f"{own} belongs to another user"
        with tempfile.TemporaryDirectory(dir=own) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            _compile(made)
            if not built.exists():
                made.rename(built)
    return built / "runtime.so"


def _compile(folder: Path) -> None:
    torch, headers = _torch(), f"-I{_cuda_headers()}"
    runtime, operators = map(str, _SOURCES)
    libraries = (f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu")
    compiler = ["g++", *_OPTIONS, headers]
    subprocess.run([*compiler, runtime, "-o", str(folder / "runtime.so"), *_ALONE], check=True)
    subprocess.run([*compiler, operators, "-o", str(folder / "operators.so"), *libraries], check=True)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _cuda_headers() -> Path:
    return _torch().parent / "triton" / "backends" / "nvidia" / "include"
