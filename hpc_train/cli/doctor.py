"""``doctor``: problems that would make runs fail on this machine or cluster; ``notify``: a test message."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import TypedDict

from hpc_train.cli.command_options import DoctorOptions, LauncherOptions, NotifyOptions
from hpc_train.cli.preflight import LauncherChoice, submittable
from hpc_train.console import put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, NoSchedulerError, UsageError, counted
from hpc_train.experiment.config.problems import COMMAND_LINE, Problem
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers import machine_checks
from hpc_train.launchers.base import CheckRequest, ClusterLauncher, Finding, Launcher, Level
from hpc_train.launchers.notifications import NotSentError, post, read_webhook, settings_file, text_of
from hpc_train.loggers.tracker_environment import has_key, needs_key
from hpc_train.paths import runs_root
from hpc_train.rank.env import count_gpus

_LOCAL_ONLY = "runs can be started here with --local only"


class Diagnosis(TypedDict):
    """Problems that would make runs fail."""

    #: How many findings there are by level.
    counts: dict[str, int]
    #: Errors first.
    findings: list[Finding]


def doctor(options: DoctorOptions) -> ExitCode:
    """Report all findings; FAILED if one is an error."""
    if options.local and options.runs_job:
        raise UsageError("--local: checks this machine alone; omit --submit and --nodes")
    choice = LauncherChoice.of(LauncherOptions(local=options.local, launcher=options.launcher))
    loaded = load(options.file, options.overrides) if options.file is not None else None
    severity = list(Level).index
    findings = sorted(_findings(choice, loaded, options), key=lambda finding: severity(finding.level))
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if options.as_json:
        items = [finding.to_json() for finding in findings]
        put_json({"counts": counts, "findings": items})
    else:
        put(*(line for finding in findings for line in _lines(finding)))
        put(f"{counted(counts[Level.ERROR], 'error')}, {counted(counts[Level.WARNING], 'warning')}")
    return ExitCode.FAILED if counts[Level.ERROR] else ExitCode.DONE


def _findings(choice: LauncherChoice, loaded: Loaded | None, options: DoctorOptions) -> Iterator[Finding]:
    launcher = choice.launcher
    experiment = loaded.experiment if loaded is not None else None
    if loaded is not None:
        yield from _file(choice, loaded)
    # The devices of ranks on this machine; jobs of a queue use other machines' GPUs.
    is_on_cpu = experiment is not None and experiment.device == "cpu"
    here = not launcher.is_queue and not is_on_cpu and count_gpus(os.environ) > 0
    prefetched = None
    if experiment is not None and not launcher.is_queue:
        prefetched = workload_of(experiment).prefetched_bytes(experiment, max(1, count_gpus(os.environ)))
    yield from machine_checks.this_machine(wants_gpu=here, prefetched_bytes=prefetched)
    yield from _webhook()
    if experiment is not None:
        yield from _wandb(experiment)
    if launcher.is_queue:
        yield from _cluster(launcher, CheckRequest(experiment, partial(_place, loaded)), options)


def _file(choice: LauncherChoice, loaded: Loaded) -> Iterator[Finding]:
    """Why ``submit`` would refuse the file, apart from the queue."""
    try:
        submittable(choice, loaded)
    except BadFileError as error:
        for problem in error.problems:
            yield Finding(Level.ERROR, "file.start", problem, loaded.source.name, "`submit` refuses the file")


def _place(loaded: Loaded | None, key: str) -> str:
    """Return the position of the key in the file: ``exp.yaml:12:3: section.key``."""
    if loaded is None:
        return key
    place = loaded.source.place(Problem(tuple(key.split(".")), "", ""))
    where = "command line" if place == COMMAND_LINE else f"{loaded.source.name}:{place.line}:{place.column}"
    return f"{where}: {key}"


def _cluster(launcher: Launcher, request: CheckRequest, options: DoctorOptions) -> Iterator[Finding]:
    if not isinstance(launcher, ClusterLauncher):
        why = "the launcher has no checks (docs/plugins.md: ClusterLauncher)"
        yield Finding(Level.WARNING, "launcher.checks", f"{launcher.title}: not checked", "", why)
        return
    try:
        yield from launcher.checks(request)
        if options.runs_job:
            nodes = [options.nodes] if options.nodes else []
            yield from launcher.node_checks(request, nodes, 60 * options.wait_min)
    except OSError as error:
        yield machine_checks.unusable_runs("the job on a node", runs_root(), error.strerror or str(error))
    except NoSchedulerError as error:
        if options.runs_job:
            raise
        yield Finding(Level.WARNING, "launcher.programs", str(error), "", _LOCAL_ONLY, "")


def _wandb(experiment: Job) -> Iterator[Finding]:
    """Whether wandb's server accepts the rows of a file that logs to it."""
    config = experiment.logging.wandb
    if config is None or not needs_key(config.mode):
        return
    source = "WANDB_API_KEY, ~/.netrc"
    if has_key():
        yield Finding(Level.OK, "wandb.key", "wandb: an API key is set", source)
        return
    effect = "rows are written to the run's folder and not sent to the server"
    remedy = "run `wandb login` or set WANDB_API_KEY; logging.wandb.mode: offline says that this is intended"
    yield Finding(Level.WARNING, "wandb.key", "wandb: no API key is set", source, effect, remedy)


def _webhook() -> Iterator[Finding]:
    """Whether the settings of the webhook can be used; nothing is sent."""
    path = settings_file()
    try:
        webhook = read_webhook(path)
    except BadFileError as error:
        why = "no run reports how it has ended"
        yield Finding(Level.WARNING, "notify.webhook", str(error), str(path), why)
        return
    if webhook is not None:
        what = f"notifications: to {webhook.host}; hpc-train notify sends a test message"
        yield Finding(Level.OK, "notify.webhook", what, str(path))


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.level:<8} {finding.what}"
    details = {"why": finding.why, "remedy": finding.remedy}
    if finding.level is not Level.OK:
        for label, text in (*details.items(), ("read from", finding.source)):
            if text:
                yield f"         {label}: {text}"


def notify(options: NotifyOptions) -> ExitCode:
    """Post a test message. IO if it can't be sent; raises UsageError without a webhook, BadFileError."""
    path = settings_file()
    webhook = read_webhook(path)
    if webhook is None:
        raise UsageError(f"{path}: there is no such file; write the line webhook: https://… to it, mode 600")
    message = text_of(f"test message of hpc-train on {socket.gethostname()}") | {"event": "test"}
    try:
        post(webhook, message)
    except NotSentError as error:
        say(f"not sent: {error}")
        return ExitCode.IO
    events = ", ".join(sorted(webhook.events)) or "nothing"
    put(f"sent to {webhook.host}; runs report there: {events}")
    return ExitCode.DONE
