"""``bundle``: packs a run into one file with which other people can reproduce it.

The file has the experiment without everything that describes the author's cluster and folders, the snapshot
of the code, the versions of packages, fingerprints of the data (and small data), digests, metrics and
checkpoints. Paths that the experiment names become paths within the archive, which ``reproduce`` replaces.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli.changes import key_of
from hpc_train.cli.evaluate import newest_experiment, one_run
from hpc_train.cli.replay_options import BundleOptions
from hpc_train.console import put, put_json, say
from hpc_train.errors import ExitCode, StorageError, UsageError, UserError, listed
from hpc_train.experiment.config.keys import JOB
from hpc_train.experiment.config.schema import EnvironmentConfig, Experiment, LoggingConfig
from hpc_train.experiment.config.sweep_sections import SweepConfig
from hpc_train.experiment.plan.input_files import DATA, WEIGHTS
from hpc_train.paths import CheckpointPaths, RunPaths, expanded, runs_root
from hpc_train.redaction import known_secrets
from hpc_train.report.run_files import RunFiles
from hpc_train.run import bundle_archive, frozen_experiment, weight_source
from hpc_train.run.bundle_archive import BundleFacts, Input
from hpc_train.run.bundle_inputs import NamedFiles, mapped_strings
from hpc_train.run.checkpoints import INHERITED, Manifest, committed, kept_best, verify
from hpc_train.run.code.snapshot import TREE, Code, linked, load
from hpc_train.run.create import inputs_differ, newest_versions, noted_changes
from hpc_train.run.extension import begin_of
from hpc_train.run.files import json_text, read_json, write_new
from hpc_train.run.find import refuse_target, run_name
from hpc_train.run.run_status import GOING_ON, read_status, run_facts
from hpc_train.run.trust import check_run
from hpc_train.run.versions import differences, in_words, installed_packages, versions

_MB = 1 << 20
#: Keys of ``run.json`` that a bundle keeps.
_RUN_KEYS = ("version", "id", "name", "content_hash", "created", "values", "workload", "ranks", "step")
_NAMED = 5
#: Shorter values of the environment are part of other words.
_MIN_SECRET = 8


class Bundled(TypedDict):
    """The file that was written."""

    #: The run's.
    id: str
    path: str
    file: str
    bytes: int
    #: A hash of the content, which ``reproduce`` prints, too.
    content: str
    #: The number of files in it.
    files: int
    #: Steps of the checkpoints in it.
    checkpoints: list[int]
    #: Keys of the experiment whose files are in it, and those whose files are not.
    included: list[str]
    not_included: list[str]
    #: Files of the code and the data that are not in it → why.
    left_out: dict[str, str]


def bundle(options: BundleOptions) -> ExitCode:
    """Write the file; the run is only read.

    Raises UsageError for a run that can't be reproduced, UserError if the file would publish a secret or a
    path of this machine.
    """
    bundle_archive.suffix_of(options.output)
    paths = one_run("bundle", [options.run])
    refuse_target(options.output)
    if options.output.exists():
        raise UsageError(f"-o: {options.output} exists; give another name")
    check_run(paths)
    with tempfile.TemporaryDirectory(prefix="hpc-train-bundle-") as folder:
        packed = _packed(paths, options, RunPaths(Path(folder) / "run"))
        content = bundle_archive.write(options.output, packed.facts, packed.files, packed.executables)
    inputs = packed.facts.inputs
    answer = Bundled(
        id=paths.folder.name,
        path=str(paths.folder),
        file=str(options.output),
        bytes=options.output.stat().st_size,
        content=content,
        files=len(packed.files),
        checkpoints=packed.facts.checkpoints,
        included=[key for key, named in inputs.items() if named.is_included],
        not_included=[key for key, named in inputs.items() if not named.is_included],
        left_out=packed.left_out,
    )
    if options.as_json:
        put_json(answer)
    else:
        put(*_text(answer, run_name(paths)))
    return ExitCode.DONE


def _text(answer: Bundled, name: str) -> list[str]:
    steps = ", ".join(map(str, answer["checkpoints"]))
    lines = [
        f"{answer['file']}  {answer['bytes'] / _MB:.1f} MB, {answer['files']:,} files of {name}",
        f"  checkpoints  {steps}",
        f"  content      {answer['content']}",
    ]
    if answer["included"]:
        lines.append(f"  included     the files of {', '.join(answer['included'])}")
    if answer["not_included"]:
        keys = ", ".join(answer["not_included"])
        lines.append(f"  not in it    the files of {keys}: `hpc-train reproduce` needs them")
    if answer["left_out"]:
        reasons = [f"{path} ({why})" for path, why in answer["left_out"].items()]
        lines.append(f"  excluded     {listed(reasons, _NAMED)}")
    return lines


@dataclass
class _Packed:
    """The content of the archive."""

    facts: BundleFacts
    files: dict[str, Path | bytes]
    executables: set[str]
    left_out: dict[str, str]


def _packed(paths: RunPaths, options: BundleOptions, new: RunPaths) -> _Packed:
    """Return the content; files that differ from the run's are written below ``new``."""
    name, status, run = run_name(paths), read_status(paths), run_facts(paths)
    if status.state in GOING_ON:
        raise UsageError(f"{name}: is {status.state}, and its files change; bundle it once it has ended")
    experiment = newest_experiment(paths, [])
    checkpoints = _chosen(paths, run, wants_all=options.all_checkpoints)
    if other := inputs_differ(paths, experiment):
        raise UserError(
            f"{', '.join(other)}: the files are not those that {name} was trained on; put them back"
        )
    named = NamedFiles(options.max_data * _MB)
    public = _public(experiment, run, named)
    private = [] if options.keep_paths else _private_paths(paths, run, named.origins)
    code, code_left_out = _code(paths, private)
    state = read_json(checkpoints[-1].state) or {}
    facts = _facts(paths, run, experiment, state.get("extra") or {}, checkpoints, named.inputs)
    new.folder.mkdir(mode=0o700)
    frozen_experiment.write(new, public)
    _write_records(paths, run, new, code.content, named.inputs)
    files: dict[str, Path | bytes] = {
        f"run/{path.name}": path
        for path in (paths.metrics, paths.digests, paths.part_digests)
        if path.is_file()
    }
    for checkpoint in checkpoints:
        files |= _checkpoint_files(checkpoint, new.checkpoint(checkpoint.step))
    files |= {f"run/{path.relative_to(new.folder)}": path for path in new.folder.rglob("*") if path.is_file()}
    files |= {f"code/{path}": content for path, content in code.files.items()}
    files["code/snapshot.json"] = json_text(code.manifest()).encode()
    files |= _packages(run)
    files |= named.files
    _refuse_private(files, private)
    _refuse_secrets(files)
    executables = {f"code/{path}" for path in code.executables}
    return _Packed(facts, files, executables, code_left_out | named.left_out)


def _chosen(paths: RunPaths, run: Mapping[str, Any], *, wants_all: bool) -> list[CheckpointPaths]:
    """Return the checkpoints to pack, lowest step first: the newest, the best, and the one it began at."""
    by_step = {checkpoint.step: checkpoint for checkpoint in reversed(committed(paths))}
    name, begin, best = run_name(paths), begin_of(run), kept_best(paths)
    if not by_step:
        raise UsageError(f"{name}: has no checkpoint, so there is nothing to reproduce")
    if begin and begin not in by_step:
        raise UsageError(
            f"{name}: extends a run from step {begin}, whose checkpoint is gone, so it can't be reproduced; "
            f"bundle {run['extends']['run']}, which it extends"
        )
    wanted = {max(by_step), begin, *([best.step] if best is not None else [])}
    chosen = [checkpoint for step, checkpoint in by_step.items() if wants_all or step in wanted]
    if problems := [problem for checkpoint in chosen for problem in verify(checkpoint)]:
        raise StorageError("\n".join(problems))
    return chosen


def _public(experiment: Experiment, run: Mapping[str, Any], named: NamedFiles) -> Experiment:
    """Return the experiment without what describes the author's cluster, and with paths of the archive."""
    update: dict[str, Any] = {
        JOB: None,
        "environment": EnvironmentConfig(),
        "logging": LoggingConfig(every_steps=experiment.logging.every_steps),
        "sweep": SweepConfig(),
        "stages": [],
        "profile": None,
        "data": experiment.data.model_copy(update={"cache": None, "cache_pixels": False, "stage": False}),
    }
    copy = experiment.model_copy(update=update)
    if isinstance(source := run.get("init_from"), str) and copy.model.init_from is not None:
        copy = weight_source.with_source(copy, source)
    data = copy.model_dump()
    for key in (DATA, WEIGHTS, weight_source.KEY):
        section, _, field_name = key.partition(".")
        value = data[section][field_name]
        if isinstance(value, str) and (_is_path(value) or expanded(value).exists()):
            data[section][field_name] = named.add(key, value)
    replaced = mapped_strings(data, lambda key, text: named.add(key, text) if _is_path(text) else text)
    return Experiment.model_validate(replaced)


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~/")) and len(text) > 2


def _private_paths(paths: RunPaths, run: Mapping[str, Any], inputs: Iterable[str]) -> list[str]:
    """Return the paths of this machine that are the author's: home, runs, code, experiment file, inputs."""
    source, code = run.get("source") or {}, run.get("code") or {}
    home, runs = str(expanded("~")), paths.siblings.folder.parent
    folders = [home, str(runs_root()), str(runs.absolute()), *inputs]
    folders += [str(Path(source["file"]).parent)] if isinstance(source.get("file"), str) else []
    folders += [code["folder"]] if isinstance(code.get("folder"), str) else []
    # One name, such as /data, is not a person's.
    return sorted({folder for folder in folders if folder == home or folder.count("/") > 1} - {"/", "~"})


def _code(paths: RunPaths, private: Sequence[str]) -> tuple[Code, dict[str, str]]:
    """Return the run's code without files other than Python that contain a path of this machine."""
    snapshot = linked(paths)
    if snapshot is None:
        raise UsageError(f"{run_name(paths)}: has no snapshot of its code, so it can't be reproduced")
    code = load(snapshot)
    left_out = {
        path: "contains a path of this machine"
        for path, content in code.files.items()
        if path.startswith(f"{TREE}/") and not path.endswith(".py") and _path_in(content, private)
    }
    files = {path: content for path, content in code.files.items() if path not in left_out}
    folders = {str(parent) for path in files for parent in Path(path).parents}
    links = {
        path: target
        for path, target in code.links.items()
        if os.path.normpath(Path(path).parent / target) in files.keys() | folders
    }
    inside = {path.removeprefix(f"{TREE}/"): why for path, why in left_out.items()}
    executables = code.executables & files.keys()
    left_out = code.left_out | inside
    return replace(code, files=files, executables=executables, links=links, left_out=left_out), inside


def _path_in(content: bytes, private: Iterable[str]) -> str | None:
    """Return the first of the paths that a file contains as whole names."""
    for path in private:
        if re.search(rb"(?<![\w.-])%b(?![\w-])" % re.escape(os.fsencode(path)), content):
            return path
    return None


def _facts(
    paths: RunPaths,
    run: Mapping[str, Any],
    experiment: Experiment,
    extra: Mapping[str, Any],
    checkpoints: Sequence[CheckpointPaths],
    inputs: dict[str, Input],
) -> BundleFacts:
    hardware, device = extra.get("hardware") or {}, extra.get("device")
    return BundleFacts(
        id=paths.folder.name,
        name=paths.siblings.folder.name,
        begin=begin_of(run),
        checkpoints=[checkpoint.step for checkpoint in checkpoints],
        ranks=Manifest.read(checkpoints[-1]).world_size,
        device=device,
        processor=hardware.get("processor"),
        threads=hardware.get("threads"),
        is_deterministic=device == "cpu" if experiment.deterministic is None else experiment.deterministic,
        versions=newest_versions(run),
        changes=list(_changes(paths, run)),
        inputs=inputs,
    )


def _changes(paths: RunPaths, run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes between the attempts of a run that no replay repeats."""
    files = RunFiles.read(paths)
    for earlier in (run.get("code") or {}).get("earlier") or []:
        yield f"other code up to attempt {earlier.get('until_attempt')}"
    for attempt in run.get("versions_by_attempt") or {}:
        yield f"other versions from attempt {attempt} on"
    ranks = {record.ranks for record in files.records if "first_step" in record.events and record.ranks}
    if len(ranks) > 1:
        yield f"attempts with {' and '.join(map(str, sorted(ranks)))} ranks"
    parallel = [
        word for word in noted_changes(paths, files.newest_number) if key_of(word).startswith("parallel")
    ]
    if parallel:
        yield f"{', '.join(parallel)} in a later attempt"


def _write_records(
    paths: RunPaths, run: Mapping[str, Any], new: RunPaths, content: str, inputs: Mapping[str, Input]
) -> None:
    """Write ``run.json`` and ``status.json`` without host names, users and paths."""
    code = run.get("code") or {}
    source = inputs.get(weight_source.KEY)
    facts = {key: run[key] for key in _RUN_KEYS if key in run} | {
        "versions": newest_versions(run),
        "code": {"commit": code.get("commit"), "dirty": code.get("dirty"), "snapshot": content},
        "inputs": {
            key: {part: value for part, value in parts.items() if part != "location"}
            for key, parts in (run.get("inputs") or {}).items()
        },
        "init_from": source.path if source is not None else None,
        "launcher": "local",
        "changes": {},
    }
    write_new(new.run, json_text(facts), sync=False)
    status = replace(read_status(paths), attempt=0, reason=None, compiling=None, slow_ranks=None)
    write_new(new.status, json_text(status.to_json()), sync=False)


def _checkpoint_files(checkpoint: CheckpointPaths, new: CheckpointPaths) -> dict[str, Path | bytes]:
    """Return the files of a checkpoint; its manifest, which ``new`` gets, names no attempt."""
    manifest = Manifest.read(checkpoint)
    new.folder.mkdir(parents=True)
    replace(manifest, attempt=INHERITED).write(new)
    folder = f"run/checkpoints/{checkpoint.folder.name}"
    return {f"{folder}/{name}": checkpoint.folder / name for name in manifest.files}


def _packages(run: Mapping[str, Any]) -> dict[str, Path | bytes]:
    """Return the files that list the packages of this environment; none if it is not the run's."""
    if other := differences(newest_versions(run), versions()):
        say(
            f"packages: this environment is not the run's ({in_words(other)}), so the bundle has only the "
            "versions that the run recorded; bundle it with the run's own Python to record all"
        )
        return {}
    packages = installed_packages()
    lines = [f"{name}=={entry['version']}\n" for name, entry in packages.items()]
    return {
        "packages.json": json_text({"packages": packages}).encode(),
        "requirements.txt": "".join(lines).encode(),
    }


def _refuse_private(files: Mapping[str, Path | bytes], private: Sequence[str]) -> None:
    problems = [
        f"{path}: contains {name}"
        for path, content in _texts(files)
        if not path.startswith("code/package/") and (name := _path_in(content, private))
    ]
    if problems:
        raise UserError(
            "\n".join([*problems[:_NAMED], *["…"] * (len(problems) > _NAMED)])
            + "\nthe bundle would publish a path of this machine; make it a key of the experiment file, "
            "or read it from the environment, and train again; or bundle it with --keep-paths"
        )


def _refuse_secrets(files: Mapping[str, Path | bytes]) -> None:
    secrets = [secret.encode() for secret in known_secrets(os.environ) if len(secret) >= _MIN_SECRET]
    paths = [path for path, content in _texts(files) if any(secret in content for secret in secrets)]
    if paths:
        raise UserError(
            f"{listed(paths, _NAMED)}: contains a password, key or token of this environment or of a file of "
            "credentials; take it out and train again"
        )


def _texts(files: Mapping[str, Path | bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the files that are not tensors, digests or inputs, with their content."""
    for path, source in files.items():
        if not path.endswith((".safetensors", ".bin")):
            yield path, source if isinstance(source, bytes) else source.read_bytes()
