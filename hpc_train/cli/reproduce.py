"""``reproduce``: verifies a bundle on this machine, with the bundle's own code.

First all of its files, by their hashes; then everything that differs here: packages, Python, processor,
ranks, data. Then the run is replayed from its start or from a checkpoint in the bundle, and digests of the
steps and tensors of the checkpoints are compared bitwise.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TypedDict

from hpc_train.cli.changes import as_override
from hpc_train.cli.evaluate import newest_experiment
from hpc_train.cli.replay import Stretch, number_of_ranks, report_begin, run_stretch
from hpc_train.cli.replay_options import ReproduceOptions
from hpc_train.cli.replayed_run import prepared, thread_variables
from hpc_train.console import put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, StorageError, UsageError, counted, listed
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.devices import device_here
from hpc_train.experiment.plan.input_files import DATA
from hpc_train.paths import RunPaths
from hpc_train.report.parted_steps import Lines, Place, place_text
from hpc_train.report.reproduction import Reproduction, reproduction, reproduction_text
from hpc_train.run import frozen_experiment, weight_source
from hpc_train.run.bundle_archive import Bundle, BundleFacts, extract
from hpc_train.run.bundle_inputs import file_problems, with_place
from hpc_train.run.checkpoints import committed, verify
from hpc_train.run.code.code_files import package_files
from hpc_train.run.code.snapshot import TREE, Code, folder_in_tree, link, linked, load, place
from hpc_train.run.create import inputs_differ
from hpc_train.run.digests import read_parts
from hpc_train.run.files import read_json, read_text, write_json, write_text
from hpc_train.run.metric_rows import iter_rows
from hpc_train.run.trust import check_run
from hpc_train.run.versions import cpu_model, differences, installed_packages, versions

_NAMED = 5
#: The losses of the last steps are compared within the tolerance: of so many of all.
_TAIL = 10


class Mismatch(TypedDict):
    """A difference between the run and this machine."""

    #: ``package``, ``python``, ``device``, ``processor``, ``threads``, ``ranks``, ``data``; ``run``: the run
    #: itself can't be repeated bitwise.
    kind: str
    #: The package, the key of the experiment, …
    name: str
    bundle: str | None
    here: str | None
    remedy: str
    #: Whether results may differ because of it.
    matters: bool


class Losses(TypedDict):
    """The mean training loss of the last tenth of the compared steps."""

    first: int
    last: int
    bundle: float
    here: float
    #: Relative to the bundle's.
    difference: float
    tolerance: float


class Reproduced(TypedDict):
    """The verification of a bundle."""

    file: str
    #: As ``bundle`` printed it.
    content: str
    #: The run's.
    id: str
    #: The run, if ``-o`` keeps it.
    path: str | None
    differences: list[Mismatch]
    #: ``checked``: nothing was run; ``bitwise``; ``tolerance``; ``differs``.
    verdict: str
    #: Null if nothing was run.
    reproduction: Reproduction | None
    #: The first difference; null: none.
    place: Place | None
    #: Null if they were not compared.
    losses: Losses | None


def reproduce(options: ReproduceOptions) -> ExitCode:
    """Check the bundle and repeat its run; exit code 1 if it is not reproduced, 2 without ``--trust``.

    Raises BadFileError if the file was changed, UsageError if data are missing.
    """
    if not options.file.is_file():
        raise UsageError(f"{options.file}: is not a file; give one that `hpc-train bundle` wrote")
    with _folder(options.output) as root:
        content = root / "bundle"
        content.mkdir(mode=0o700)
        bundle = extract(options.file, content)
        code = load(content / "code")
        say(f"{options.file}: all {len(bundle.members):,} files have their hashes; content {bundle.content}")
        run = _unpacked(root, bundle.facts, code, _places(options, bundle, content))
        overrides = []
        if options.data is not None and DATA not in bundle.facts.inputs:  # a relative path, or the hub's name
            overrides.append(as_override(DATA, str(_absolute(options.data))))
        answer = _verified(options, bundle, run, code, newest_experiment(run, overrides))
        answer["path"] = str(run.folder) if options.output is not None else None
    if options.as_json:
        put_json(answer)
    return {"checked": ExitCode.USAGE, "differs": ExitCode.FAILED}.get(answer["verdict"], ExitCode.DONE)


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Yield a new private folder; it is removed after an error, and at the end unless it is ``output``."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="hpc-train-reproduce-") as folder:
            yield Path(folder)
        return
    if os.path.lexists(output):
        raise UsageError(f"-o: {output} exists; give a new folder")
    root = output.absolute()
    root.mkdir(mode=0o700)
    try:
        yield root
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _places(options: ReproduceOptions, bundle: Bundle, content: Path) -> dict[str, Path]:
    """Return key → path on this machine of each input. Raises UsageError for a missing or unknown one."""
    inputs, mapped = bundle.facts.inputs, _mapped(options)
    if unknown := mapped.keys() - inputs.keys() - {DATA}:
        keys = ", ".join(inputs) or "none"
        raise UsageError(
            f"--set: {listed(sorted(unknown), _NAMED)} names no file of the bundle; its keys: {keys}"
        )
    places = {}
    for key, named in inputs.items():
        if key not in mapped and not named.is_included:
            option = "--data PATH" if key == DATA else f"--set {key}=PATH"
            raise UsageError(f"{options.file}: does not contain the files of {key}; add {option}")
        places[key] = mapped.get(key, content / named.path)
        if not places[key].exists():
            raise UsageError(f"{key}: there is no {places[key]}; give the place of its files")
    return places


def _mapped(options: ReproduceOptions) -> dict[str, Path]:
    mapped = {} if options.data is None else {DATA: _absolute(options.data)}
    for word in options.places:
        key, equals, path = word.partition("=")
        if not (equals and path):
            raise UsageError(f"--set: {word} has no path; write KEY=PATH")
        mapped[key] = _absolute(Path(path))
    return mapped


def _unpacked(root: Path, facts: BundleFacts, code: Code, places: Mapping[str, Path]) -> RunPaths:
    """Make a run folder of the extracted files, whose paths are those of this machine."""
    runs = root / "runs"
    run = RunPaths(runs / facts.name / facts.id)
    for folder in (runs, run.folder.parent):
        folder.mkdir(mode=0o700)
    (root / "bundle" / "run").rename(run.folder)
    link(run, place(runs / ".code", code))
    text = read_text(run.resolved)
    for key, path in places.items():
        text = with_place(text, facts.inputs[key], path)
    write_text(run.resolved, text)
    write_text(run.experiment, frozen_experiment.dump(frozen_experiment.read(run)))
    record = read_json(run.run)
    if record is None:
        raise BadFileError(f"{run.run}: is not a record of a run")
    if weight_source.KEY in places:
        write_json(run.run, record | {"init_from": str(places[weight_source.KEY])})
    check_run(run)
    saved = committed(run)
    problems = [problem for checkpoint in saved for problem in verify(checkpoint)]
    if problems or not saved or sorted(one.step for one in saved) != sorted(facts.checkpoints):
        raise BadFileError(problems or f"{run.checkpoints}: does not have the checkpoints of the bundle")
    return run


def _verified(
    options: ReproduceOptions, bundle: Bundle, run: RunPaths, code: Code, experiment: Experiment
) -> Reproduced:
    """Compare this machine with the run's; with ``--trust``, repeat the run."""
    facts = bundle.facts
    has_gpu = facts.device == "cuda" and device_here("auto", 1).is_gpu
    experiment = experiment.model_copy(update={"device": "cuda" if has_gpu else "cpu"})
    stretch = _stretch(options, facts, run)
    num_ranks = options.devices or number_of_ranks(experiment, stretch)
    mismatches = [
        *_data(options, bundle, run, experiment),
        *_environment(run, bundle, num_ranks, has_gpu=has_gpu),
    ]
    answer = Reproduced(
        file=str(options.file),
        content=bundle.content,
        id=facts.id,
        path=None,
        differences=mismatches,
        verdict="checked",
        reproduction=None,
        place=None,
        losses=None,
    )
    _report(mismatches, code, experiment, shows=not options.as_json)
    if any(mismatch["kind"] == "data" for mismatch in mismatches):
        say("not reproduced: the data are not those of the run, so nothing was run")
        answer["verdict"] = "differs"
        return answer
    if not options.trust:
        say(
            f"nothing was run: --trust executes the code in {options.file} with your "
            "permissions, so you must trust its author; -o DIR extracts it to look at it first"
        )
        return answer
    parts = dict(read_parts(run.part_digests))
    lines = _replayed(stretch, facts, experiment, num_ranks, [*facts.checkpoints, *parts])
    name = facts.id
    checkpoints = {saved.step: saved for saved in reversed(committed(run))}
    compared, first = reproduction(name, checkpoints, lines, stretch.begin, parts)
    losses = _losses(lines, run, options.tolerance)
    answer |= {"reproduction": compared, "place": first, "losses": losses}
    answer["verdict"] = _verdict(compared, losses, may_differ=any(one["matters"] for one in mismatches))
    if not options.as_json:
        put(reproduction_text(compared), *(place_text(first, [name]) if first else []), _words(answer))
    return answer


def _stretch(options: ReproduceOptions, facts: BundleFacts, run: RunPaths) -> Stretch:
    """Return the steps to repeat. Raises UsageError if there are none."""
    last = options.last or max(facts.checkpoints)
    starts = [facts.begin, *(step for step in facts.checkpoints if step > facts.begin)]
    begin = max((step for step in starts if step < options.first), default=facts.begin)
    if begin >= last:
        raise UsageError(
            f"--to: {last} is not after step {begin}, from which the run is repeated; write more"
        )
    return Stretch(run, begin, last, last, facts.ranks)


def _data(
    options: ReproduceOptions, bundle: Bundle, run: RunPaths, experiment: Experiment
) -> Iterator[Mismatch]:
    """Yield the inputs whose files are not the run's; those from the archive are verified already."""
    mapped = _mapped(options)
    named = {key: bundle.facts.inputs[key] for key in mapped if key in bundle.facts.inputs}
    problems = {key: file_problems(named[key], mapped[key], bundle.members) for key in named}
    for key in inputs_differ(run, experiment):
        if not problems.get(key):
            problems[key] = ["its fingerprint is another"]
    for key, lines in problems.items():
        if lines:
            remedy = "restore these files, or give the place of the run's data"
            yield _mismatch("data", key, None, listed(lines, _NAMED), remedy)


def _mismatch(
    kind: str, name: str, bundle: object, here: object, remedy: str, *, matters: bool = True
) -> Mismatch:
    texts = [None if value is None else str(value) for value in (bundle, here)]
    return Mismatch(kind=kind, name=name, bundle=texts[0], here=texts[1], remedy=remedy, matters=matters)


def _environment(run: RunPaths, bundle: Bundle, num_ranks: int, *, has_gpu: bool) -> Iterator[Mismatch]:
    facts = bundle.facts
    yield from _packages(facts, run)
    if facts.device == "cuda" and not has_gpu:
        yield _mismatch("device", "device", "GPU", "CPU", "run it on a machine with a GPU")
    elif facts.processor is not None:
        then = facts.processor if facts.device == "cuda" else facts.processor.rpartition(" (")[0]
        here = device_here("cuda", 1).name if has_gpu else cpu_model()
        if then != here:
            remedy = "use a machine with that processor; others round sums differently"
            yield _mismatch("processor", "processor", then, here, remedy)
    if num_ranks != facts.ranks:
        remedy = f"add --devices {facts.ranks}"
        yield _mismatch("ranks", "ranks", facts.ranks, num_ranks, remedy)
    threads = facts.threads or []
    if facts.device == "cpu" and len(set(threads)) > 1:
        remedy = "ranks with different numbers of threads are not repeated here"
        yield _mismatch("threads", "threads", ", ".join(map(str, threads)), None, remedy)
    cores = len(os.sched_getaffinity(0))
    if facts.device == "cpu" and sum(threads) > cores:
        remedy = "slower, but the same result: ranks use as many threads as in the run"
        yield _mismatch("threads", "cores", sum(threads), cores, remedy, matters=False)
    for change in facts.changes:
        yield _mismatch("run", change, None, None, "begin at a later checkpoint with --from STEP")
    if not facts.is_deterministic:
        yield _mismatch("run", "not deterministic", None, None, "train it with deterministic: true")


def _packages(facts: BundleFacts, run: RunPaths) -> Iterator[Mismatch]:
    """Yield the versions of Python and of packages that differ; those that compute the numbers first."""
    for name, (then, now) in differences(facts.versions, versions()).items():
        remedy = f"pip install {name}=={then}" if then else f"pip uninstall {name}"
        if name == "hpc-train":
            yield _mismatch("package", name, then, now, "the bundle's own copy is run", matters=False)
        elif name == "python":
            yield _mismatch("python", name, then, now, f"run it with Python {then}")
        else:
            yield _mismatch("package", name, then, now, remedy)
    record = run.siblings.folder.parent.parent / "bundle" / "packages.json"
    recorded = (read_json(record) or {}).get("packages")
    here = installed_packages()
    for name, entry in recorded.items() if isinstance(recorded, dict) else ():
        then, digest = (entry.get(key) for key in ("version", "sha256"))
        installed = here.get(name) or {"version": None, "sha256": None}
        computes = name in facts.versions
        if installed["version"] != then and not computes:
            yield _mismatch(
                "package", name, then, installed["version"], f"pip install {name}=={then}", matters=False
            )
        elif installed["version"] == then and digest and installed["sha256"] not in (None, digest):
            builds = (f"{then} of {str(digest)[:12]}", f"{then} of {str(installed['sha256'])[:12]}")
            yield _mismatch("package", name, *builds, "install the same build of it", matters=computes)


def _report(mismatches: Sequence[Mismatch], code: Code, experiment: Experiment, *, shows: bool) -> None:
    """Print the code that will run, and the differences."""
    installed = package_files()
    packed = {path.removeprefix("package/"): path for path in code.files if path.startswith("package/")}
    changed = [
        path
        for path in packed
        if path not in installed or installed[path].read_bytes() != code.files[packed[path]]
    ]
    same = (
        "as installed here" if not changed else f"{counted(len(changed), 'file')} of it not as installed here"
    )
    names = [experiment.task, experiment.model.name, experiment.data.name]
    names += [experiment.data.transform.name] if experiment.data.transform else []
    commit = (code.commit or {}).get("commit")
    files = counted(len(code.files) - len(packed), "file")
    say(
        f"code: {files}{f' of commit {commit[:12]}' if commit else ''}, and hpc-train, {same}; imports "
        f"{', '.join(name for name in names if ':' in name) or 'none of these files by name'}"
    )
    if not shows:
        return
    minor = [mismatch for mismatch in mismatches if not mismatch["matters"]]
    put(*(_difference_text(mismatch) for mismatch in mismatches if mismatch["matters"]))
    put(*(_difference_text(mismatch) for mismatch in minor[:_NAMED]))
    if len(minor) > _NAMED:
        put(f"differs: {len(minor) - _NAMED} more, which hpc-train does not compute with (--json lists them)")
    if not mismatches:
        put("nothing differs: packages, Python, processor, ranks, data")


def _difference_text(mismatch: Mismatch) -> str:
    then, here = mismatch["bundle"], mismatch["here"]
    if then is None and here is None:
        return f"differs: the run: {mismatch['name']}: {mismatch['remedy']}"
    if mismatch["kind"] == "data":
        return f"differs: {mismatch['name']}: {here}: {mismatch['remedy']}"
    return f"differs: {mismatch['name']} {then or 'none'} → {here or 'none'}: {mismatch['remedy']}"


def _replayed(
    stretch: Stretch, facts: BundleFacts, experiment: Experiment, num_ranks: int, compared: Sequence[int]
) -> Lines:
    """Repeat the steps in the folder of the code, and return the ranks' lines by step.

    ``compared``: the steps after which tensors are compared.
    """
    report_begin(stretch, num_ranks)
    snapshot = linked(stretch.run)
    assert snapshot is not None, "it was placed"
    states = sorted({stretch.begin, *(step for step in compared if step <= stretch.last)})
    with chdir(snapshot / TREE / folder_in_tree(snapshot)):
        lines = run_stretch(
            stretch,
            prepared(experiment),
            snapshot,
            num_ranks,
            digests={"states": states},
            variables=thread_variables({"threads": facts.threads, "device": facts.device}),
        )
    if lines is None:
        raise HpcTrainError("not reproduced: the replay failed")
    if not lines[0] or "state" not in lines[0][0]:
        raise StorageError(
            "the bundle's hpc-train computes no digests; it was not written by `hpc-train bundle`"
        )
    return {of_ranks[0]["step"]: of_ranks for of_ranks in zip(*lines, strict=False)}


def _losses(lines: Lines, run: RunPaths, tolerance: float) -> Losses | None:
    """Return the mean losses of the last steps; None if the run recorded none of these steps."""
    rows = {row["step"]: row.get("loss") for row in iter_rows(run.metrics) if row["split"] == "train"}
    pairs = []
    for step, of_ranks in lines.items():
        digest = of_ranks[0].get("digest")
        then = (of_ranks[0].get("recorded") or {}).get("loss", rows.get(step))
        if digest is not None and isinstance(then, float):
            pairs.append((step, then, float(digest["loss"])))
    if not pairs:
        return None
    tail = pairs[-max(1, len(pairs) // _TAIL) :]
    then, here = (math.fsum(pair[place] for pair in tail) / len(tail) for place in (1, 2))
    difference = abs(here - then) / max(abs(then), 1e-12)
    if not math.isfinite(difference):
        return None
    return Losses(
        first=tail[0][0], last=tail[-1][0], bundle=then, here=here, difference=difference, tolerance=tolerance
    )


def _verdict(compared: Reproduction, losses: Losses | None, *, may_differ: bool) -> str:
    if compared["is_reproducible"]:
        return "bitwise"
    is_near = losses is not None and losses["difference"] <= losses["tolerance"]
    return "tolerance" if is_near and (may_differ or compared["is_reproducible"] is None) else "differs"


def _words(answer: Reproduced) -> str:
    losses, verdict = answer["losses"], answer["verdict"]
    if verdict == "bitwise":
        return "reproduced: bitwise identical"
    if losses is None:
        return "not reproduced: no losses of the same steps can be compared"
    text = (
        f"the mean loss of steps {losses['first']} to {losses['last']} is {losses['here']:.6g} here and "
        f"{losses['bundle']:.6g} in the bundle: {losses['difference']:.2%}, "
        f"tolerance {losses['tolerance']:.2%}"
    )
    if verdict == "tolerance":
        return f"reproduced within the tolerance, not bitwise: {text}"
    if any(mismatch["matters"] for mismatch in answer["differences"]):
        return f"not reproduced: {text}"
    return f"not reproduced, although nothing differs that explains it: {text}"
