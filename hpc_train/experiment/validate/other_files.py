"""Paths that are not experiment files, and what to pass instead: scripts, runs, weights, misspelled names."""

from __future__ import annotations

import glob
from pathlib import Path

from hpc_train.paths import runs_root
from hpc_train.registry import nearest

_DESCRIBE = (
    "hpc-train trains the model, data and task that a YAML file names: `hpc-train init` writes one, and "
    "model.name, data.name and task accept your own code as package.module:factory (docs/plugins.md)"
)
_SCRIPT = (
    "to run it as it is, write a file with `name: my-run` and `program: {command: [python, FILE]}` "
    "(docs/programs.md); to move its parts, " + _DESCRIBE
)
#: Suffixes → the kind of file, and what to do instead.
_KINDS = {
    ".py .pyw": ("a Python script", _SCRIPT),
    ".ipynb": ("a notebook", _DESCRIBE),
    ".sh .bash .slurm .sbatch .job .batch .pbs": (
        "a batch script",
        "hpc-train writes its own from the `slurm:` section of a YAML file, which `hpc-train init` writes",
    ),
    ".pt .pth .ckpt .bin .safetensors .onnx .tar": (
        "a file of weights",
        "write it as model.init_from in a YAML file; `hpc-train resume RUN` continues a run",
    ),
    ".toml .ini .cfg": ("not YAML", "`hpc-train init` writes an experiment file, exp.yaml"),
}
_BY_SUFFIX = {suffix: kind for suffixes, kind in _KINDS.items() for suffix in suffixes.split()}


def why_not_yaml(path: Path) -> str | None:
    """Return what the file is and what to do instead; None if it may be an experiment file."""
    kind, remedy = _BY_SUFFIX.get(path.suffix.lower(), ("", ""))
    remedy = remedy.replace("FILE]", f"{path.name}]")
    return f"{path}: is {kind}, not an experiment file; {remedy}" if kind else None


def instead_of_missing(path: Path) -> str:
    """Return what to write instead of a path that can't be read: a file beside it, or a command for a run."""
    folder = path if path.is_dir() else path.parent
    names = {str(folder / name): name for name in sorted(_yaml_files(folder))}
    if path.is_dir():
        return f"write {next(iter(names))}" if names else "give the path of an experiment file"
    for suffix in (".yaml", ".yml"):
        if str(path.with_name(f"{path.name}{suffix}")) in names:
            return f"write {path}{suffix}"
    if _is_run(str(path)):
        return f"it is a run: `hpc-train status {path}` shows it, `hpc-train resume {path}` continues it"
    if close := nearest(str(path), names):
        return f"did you mean {close}?"
    return "give the path of an experiment file; `hpc-train init` writes one"


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []


def _is_run(word: str) -> bool:
    if not word.isprintable() or word in {"", ".", ".."}:
        return False
    root = runs_root()
    return (root / word).is_dir() or ("/" not in word and any(root.glob(f"*/{glob.escape(word)}*")))
