"""Slurm's programs: run as argument lists, within a limit; two errors: no Slurm, and a Slurm that refuses.

Slurm's last answer about the queue is cached in a small file: all commands of a user on this host query it
once per 10 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train.errors import NoSchedulerError, UserError, shortened
from hpc_train.paths import cache_folder
from hpc_train.run.files import write_text

#: Above Slurm's own time-out: a command that finds no slurmctld gives up after 9 to 18 s (measured, 22.05).
LIMIT_S = 60.0
_ATTEMPTS = 4
_WORDS_MAX = 1000
#: sbatch passes its environment, including the locale, on to the job, so it is unchanged.
_UNCHANGED = {"sbatch"}
#: The option of sbatch with which it submits nothing and prints when the job would start.
_TEST_ONLY = "--test-only"
#: Formats and filters that a user may have set: output must have a fixed format, and commands must reach the
#: intended job.
_PREFIXES = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")
_FORMATS = {"LC_ALL": "C", "TZ": "UTC0", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
#: Messages of Slurm (20.02 to 24.11, read and measured) if its daemons do not answer.
_NO_ANSWER = re.compile(
    r"unable to contact|unable to connect|connect(ion)? (refused|failure|timed out)|timed out on send/recv"
    r"|zero bytes were transmitted|standby mode|in transition|temporarily unable"
    r"|communications? (connection )?(failure|shutdown)|transport endpoint"
    r"|resource temporarily unavailable|unexpected message"
    r"|failed to open persistent|problem talking to the database|munge|authentication"
    r"|configuration source|unable to process configuration|cannot stat file|clustername needs"
    r"|unable to establish|address to|no route to host",
    re.IGNORECASE,
)
#: sbatch's last line about a job that was not submitted; what a site prints before it may be about anything.
_NOT_SUBMITTED = re.compile(r"(?:job submission failed|allocation failure): *(\S.*)")
#: Slurm has no configuration here, for which its commands have waited themselves.
_NO_CONFIGURATION = re.compile(r"configuration source|cannot stat file", re.IGNORECASE)
_FIELD = re.compile(r"(?:^| )([A-Za-z][\w/]*)=(.*?)(?= [A-Za-z][\w/]*=|$)")
#: An argument list of ids has its limits.
_JOBS_A_COMMAND = 500
_HAVE_ENDED = re.compile(r"already complet|invalid job id", re.IGNORECASE)


class RefusedError(UserError):
    """Slurm refused the command. ``words`` is its message."""

    def __init__(self, argv: Sequence[str], words: str) -> None:
        self.words = words
        super().__init__(f"Slurm refused `{shlex.join(argv)}`: {words}")


class NoAnswerError(NoSchedulerError):
    """Slurm is installed here but does not answer now; asking again may help."""


def run(
    argv: Sequence[str],
    *,
    limit_s: float = LIMIT_S,
    retry: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Run one of Slurm's programs; return its output.

    ``retry``: repeat with growing pauses while there is no answer. Not for sbatch, which may have succeeded.
    ``environ``: the environment of this process unless stated. Raises NoSchedulerError if there is no Slurm
    or no answer, RefusedError if Slurm refuses.
    """
    if not retry:
        return _run(argv, limit_s, environ)
    import stamina

    stamina.instrumentation.set_on_retry_hooks([])  # its log lines would mix with ours
    for attempt in stamina.retry_context(
        on=_may_answer_later, attempts=_ATTEMPTS, timeout=3 * limit_s, wait_initial=0.5, wait_max=10.0
    ):
        with attempt:
            return _run(argv, limit_s, environ)
    raise AssertionError("the last attempt returns or raises")


def _may_answer_later(error: Exception) -> bool:
    return isinstance(error, NoAnswerError) and not _NO_CONFIGURATION.search(str(error))


def _run(argv: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            env=_environment(argv, environ),
        )
    except FileNotFoundError:
        raise NoSchedulerError(
            f"{argv[0]}: no such program here; is this a login node of the cluster? "
            "Load Slurm's module, or add --local to train on this machine"
        ) from None
    except OSError as error:
        raise NoSchedulerError(f"{argv[0]}: can't be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"Slurm does not answer: `{_shown(argv)}` said nothing for {limit_s:g} s"
        ) from None
    # A site's wrapper may return 0 after a refusal; one that tried again has printed a number.
    has_number = argv[0] != "sbatch" or any(map(str.isdigit, done.stdout))
    if done.returncode == 0 and (has_number or not _NOT_SUBMITTED.search(done.stderr)):
        return done.stdout + (done.stderr if _TEST_ONLY in argv else "")  # sbatch prints the start time there
    raise failure(argv, done.stderr or done.stdout or f"exit code {done.returncode}")


def failure(argv: Sequence[str], output: str) -> NoAnswerError | RefusedError:
    """Return the error for a program that failed with this output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    message = shortened("; ".join(dict.fromkeys(lines)), _WORDS_MAX)
    if _NO_ANSWER.search("; ".join(_NOT_SUBMITTED.findall(output)) or message):
        return NoAnswerError(f"Slurm does not answer: `{_shown(argv)}` said: {message}")
    return RefusedError(argv, message)


def _environment(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    if argv[0] in _UNCHANGED and _TEST_ONLY not in argv:
        return dict(environ)
    filtered = {name: value for name, value in environ.items() if not name.startswith(_PREFIXES)}
    return filtered | _FORMATS


def _shown(argv: Sequence[str]) -> str:
    return shortened(shlex.join(argv), 200)


def release(job: str) -> None:
    """Release a held job, or all tasks of an array. Jobs that are not held are unchanged."""
    _order(["scontrol", "release", job], retry=True)


def cancel_jobs(ids: Sequence[str]) -> None:
    """End these jobs (``12``, ``12_3``) for good. Jobs that have already ended are ignored."""
    for start in range(0, len(ids), _JOBS_A_COMMAND):
        batch = list(ids[start : start + _JOBS_A_COMMAND])
        try:
            _order(["scancel", *batch], retry=True)
        except RefusedError as error:
            if not _HAVE_ENDED.search(error.words):
                raise


def _order(argv: Sequence[str], *, retry: bool = False) -> None:
    """Run a command that changes Slurm's state, and drop cached answers even if it fails."""
    try:
        run(argv, retry=retry)
    finally:
        forget_answer()


@cache
def config() -> dict[str, str]:
    """Return ``scontrol show config``: MaxArraySize, KillWait, JobRequeue, …; queried once per process."""
    return parsed_config(run(["scontrol", "show", "config"], retry=True))


def parsed_config(output: str) -> dict[str, str]:
    """Return the settings of ``scontrol show config``."""
    pairs = [line.partition("=") for line in output.splitlines() if "=" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}


def cluster_name() -> str | None:
    """Return the name of the cluster that Slurm's programs reach from here; None if it is unknown now."""
    try:
        return _cluster_name()
    except (NoSchedulerError, RefusedError):
        return None


@cache
def _cluster_name() -> str:
    shown = run(["scontrol", "show", "config"], limit_s=30.0)
    names = set(re.findall(r"^ClusterName\s*=\s*(\S+)", shown, re.M))
    if len(names) != 1 or "(null)" in names:  # none, or several clusters in SLURM_CLUSTERS
        raise NoAnswerError("`scontrol show config` names no cluster, or several")
    return str(names.pop()).lower()


@cache
def partition(name: str = "") -> dict[str, str]:
    """Return ``scontrol show partition``: GraceTime, PreemptMode, …; the default one without a name."""
    argv = ["scontrol", "--oneliner", "show", "partition", *([name] if name else [])]
    lines = run(argv, retry=True).splitlines()
    listed = [fields(line) for line in lines]
    # A wrapper's banner is a line as well.
    return next(
        (facts for facts in listed if "PartitionName" in facts and (name or facts.get("Default") == "YES")),
        {},
    )


def fields(line: str) -> dict[str, str]:
    """Return the fields of a line of ``scontrol --oneliner show``; a value ends before the next key."""
    return {key: value.strip() for key, value in _FIELD.findall(line)}


def job_line(shown: str) -> str:
    """Return the line of ``scontrol --oneliner show job`` on the first job, without banners; or empty."""
    lines = (line.strip() for line in shown.splitlines())
    return next((line for line in lines if line.startswith("JobId=")), "")


def own_jobs() -> list[tuple[str, str]]:
    """Return (job, script) of this user's jobs that wait or run; an array is listed once, by its number."""
    output = run(["squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%o"], retry=True)
    pairs = dict.fromkeys(tuple(line.split("|", 1)) for line in output.splitlines() if "|" in line)
    return [(job, script) for job, script in pairs if job.isdigit()]


MAX_AGE_S = 10.0
#: How long to wait for another command's query; after that each command queries itself.
_LOCK_LIMIT_S = 90.0

#: If the cache folder can't be written, only this process shares its answers.
_own_answers: dict[Path, dict[str, Any]] = {}

Answer = dict[str, Any]


def shared_answer(
    max_age_s: float, is_enough: Callable[[Answer], bool], ask: Callable[[Answer | None], Answer]
) -> Answer:
    """Return the last answer if it is no older than ``max_age_s`` and ``is_enough``, else a new one.

    ``ask`` receives the last answer of any age. A command that waits while another one queries uses the
    other's answer. ``asked`` is the time of the query, in seconds since 1970.
    """
    called = time.time()
    with _answer_locked():
        last = _read_answer()
        now = time.time()
        # An answer from the future has an unknown age: the clock was set back.
        if last is not None and called - max_age_s <= last["asked"] <= now and is_enough(last):
            return last
        answer = ask(last) | {"version": 1, "asked": now}
        _write_answer(answer)
        return answer


def forget_answer() -> None:
    """Drop the cached answer after a change. Waits for a query in progress."""
    with _answer_locked():
        _write_answer((_read_answer() or {"version": 1}) | {"asked": 0.0})


def _answer_file() -> Path:
    """Return the file of this user, host and cluster: login hosts of two clusters may share a home."""
    cluster = [os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")]
    digest = hashlib.sha256(json.dumps([socket.gethostname(), os.getuid(), *cluster]).encode()).hexdigest()
    return cache_folder() / f"slurm-{digest[:16]}.json"


@contextmanager
def _answer_locked() -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(_answer_file().with_suffix(".lock"), timeout=_LOCK_LIMIT_S, mode=0o600)
    try:
        _answer_file().parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, Timeout, NotImplementedError):
        yield  # no locks here, or a process hangs: at worst Slurm is queried twice
        return
    try:
        yield
    finally:
        lock.release()


def _read_answer() -> Answer | None:
    file = _answer_file()
    try:
        if file.stat().st_uid != os.geteuid():  # in a shared_answer folder another user could have created it
            return None
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _own_answers.get(file)
    is_ours = isinstance(answer, dict) and answer.get("version") == 1
    return answer if is_ours and isinstance(answer.get("asked"), float) else None


def _write_answer(answer: Answer) -> None:
    file = _answer_file()
    try:
        write_text(file, json.dumps(answer))
    except OSError:
        _own_answers[file] = answer
    else:
        _own_answers.pop(file, None)
