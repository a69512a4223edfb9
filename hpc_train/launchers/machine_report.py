"""Describes the machine that runs it as one line of JSON: ``python machine_report.py CHECK_FOLDER``.

``doctor`` runs it as a child process here and sends its source to nodes as a batch script, so it uses the
standard library of any Python 3.6 and nothing of this package. ``machine_checks`` evaluates its output.
"""

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Packages that ranks import; all others are their dependencies.
_MODULES = [
    "torch", "torchvision", "timm", "numpy", "pydantic", "yaml", "submitit", "safetensors", "simplejpeg",
    "wandb",
]  # fmt: skip
#: Importing torch from a cold shared file system takes tens of seconds.
_TORCH_LIMIT_S = 120
_QUOTA_LIMIT_S = 20
_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": []}
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{number}")
        assert (ones @ ones).sum().item() == 64.0**3, f"a product of matrices on GPU {number} is wrong"
        found["gpus"].append(torch.cuda.get_device_name(number))
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def report(folder: str) -> "dict[str, Any]":
    """Return the facts of this machine. ``folder``: this check's folder, within the folder of runs."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "rdma": _names("/sys/class/infiniband"),
        "missing": [name for name in _MODULES if importlib.util.find_spec(name) is None],
        "quota": _quota(),
        "shm": _shared_memory(),
    }
    facts.update(_folder(folder))
    facts["torch"] = {} if "torch" in facts["missing"] else _torch()
    return facts


def _limit(kind: int) -> "list[int | None]":
    """Return the soft and the hard limit; None: unlimited, or unknown since a sandbox refuses the call."""
    try:
        return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)]
    except OSError:
        return [None, None]


def _names(folder: str) -> "list[str]":
    try:
        return sorted(path.name for path in Path(folder).iterdir())
    except OSError:
        return []


def _free_bytes(folder: str) -> "int | None":
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_bavail * size.f_frsize if size.f_blocks else None  # 0 of 0: blocks are not counted


def _folder(folder: str) -> "dict[str, Any]":
    """Return the folder's properties as seen from here, and this clock's lead over the file server's."""
    try:
        handle, path = tempfile.mkstemp(dir=folder)
    except OSError as error:
        return {"folder": error.strerror}
    try:
        os.write(handle, b"x" * 4096)
        now = time.time()
        lead = now - Path(path).stat().st_mtime
        return {"folder": "", "clock_lead_s": lead, "free_bytes": _free_bytes(folder)}
    except OSError as error:
        return {"folder": error.strerror}
    finally:
        os.close(handle)
        Path(path).unlink()


def _shared_memory() -> "dict[str, Any]":
    try:
        handle, path = tempfile.mkstemp(prefix="hpc-train-", dir="/dev/shm")
        os.close(handle)
        Path(path).unlink()
        size = os.statvfs("/dev/shm")
    except OSError as error:
        return {"error": error.strerror}
    return {"bytes": size.f_blocks * size.f_frsize}


def _quota() -> str:
    """Return the output of ``quota -q``: the file systems on which this user is over quota, if any."""
    try:
        done = subprocess.run(
            ["quota", "-q"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_QUOTA_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()[:500] if done.returncode else ""


def _torch() -> "dict[str, Any]":
    """Import torch in a separate process and return its facts, or ``{"error": …}``."""
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(  # noqa: UP022  (not before 3.7)
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=_TORCH_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took longer than {_TORCH_LIMIT_S} s"}
    for line in done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []:
        if line.startswith('{"'):  # a site's Python may print more
            facts: dict[str, Any] = json.loads(line)
            return facts
    error_lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
        f"exit code {done.returncode}"
    ]
    return {"error": error_lines[-1][:500]}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1])))
