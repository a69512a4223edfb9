"""``validate``, ``schema`` and ``prepare``: the commands on a file alone."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.command_options import LauncherOptions, PrepareOptions, SchemaOptions, ValidateOptions
from hpc_train.cli.plan import say_layouts
from hpc_train.cli.preflight import LauncherChoice, lacking_parts, say_remarks, submittable
from hpc_train.console import put_json, say
from hpc_train.errors import BadFileError, ExitCode, counted
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig, ModelConfig
from hpc_train.experiment.data_facts.by_name import data_facts, provider_facts
from hpc_train.experiment.plan.planning import Plan, make_plan
from hpc_train.experiment.plan.staged_file import described, load_stages
from hpc_train.experiment.plan.sweep import expand
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.experiment.workload import workload_of
from hpc_train.paths import expanded
from hpc_train.registry import split_name


class Validation(TypedDict):
    """Whether a file is valid: it is if there are no problems."""

    file: str
    #: The experiment's name; null if the file is not valid.
    name: str | None
    #: Number of runs that it plans; null if it is not valid.
    runs: int | None
    #: As printed without ``--json``: position, key, rule and remedy.
    problems: list[str]
    #: The code of each problem, like ``batch.undivided``: it stays if the wording changes. ``other``: none.
    codes: list[str]


@one_child()
def validate(options: ValidateOptions) -> ExitCode:
    """Report that the file is valid; raises BadFileError with all problems, or prints them as JSON."""
    file, overrides = options.file, options.overrides
    if not options.as_json:
        checked, count = _checked(file, overrides)
        for loaded, plan in checked:
            stage = f"{described(loaded)}: " if loaded.stage else ""
            of = f"{counted(1 if stage else count, 'run')} of {plan.name}"
            say(f"{file}: {stage}fine: {of}")
            say_layouts(plan.runs)
            say_remarks(loaded)
        return ExitCode.DONE
    answer = Validation(file=str(file), name=None, runs=None, problems=[], codes=[])
    try:
        checked, count = _checked(file, overrides)
    except BadFileError as error:
        codes = [getattr(line, "code", "other") for line in error.problems]
        put_json(answer | {"problems": error.problems, "codes": codes})
        return error.exit_code
    put_json(answer | {"name": checked[0][1].name, "runs": count})
    for loaded, _ in checked:
        say_remarks(loaded)
    return ExitCode.DONE


def _checked(file: Path, overrides: Sequence[str]) -> tuple[list[tuple[Loaded, Plan]], int]:
    """Return the acceptable stages, their plans, and the number of runs. BadFileError has all problems."""
    choice = LauncherChoice.of(LauncherOptions())
    checked = [(loaded, submittable(choice, loaded)) for loaded in load_stages(file, overrides)]
    search = checked[0][0].experiment.sweep.search
    return checked, search.trials if search else sum(len(plan.runs) for _, plan in checked)


def schema(options: SchemaOptions) -> ExitCode:
    """Print the JSON Schema of the file."""
    from hpc_train.experiment.config.keys import schema_for_editors

    print(json.dumps(schema_for_editors(), indent=1), flush=True)
    return ExitCode.DONE


def prepare(options: PrepareOptions) -> int:
    """Try the file's parts in a child process with torch, after a look for impossible downloads."""
    if problems := impossible_downloads(options.file, options.overrides):
        raise BadFileError(problems)
    loaded = load(options.file, options.overrides)
    if problems := lacking_parts(loaded, make_plan(loaded)):
        raise BadFileError(problems)
    flags = [*(["--no-forward"] if options.no_forward else []), *(["--json"] if options.as_json else [])]
    module = workload_of(loaded.experiment).preparation
    request = (module, str(options.file), *flags, *options.overrides)
    if not options.as_json:
        return run_child(*request)
    code, report = child_report(*request)
    if code == ExitCode.DONE:
        put_json(report)
    return code


#: Until a connection is established, the lookup of the name included. Assumed: a usable network needs less.
_LIMIT_S = 2.0
#: Switches of the Hugging Face clients: they use their cache and don't retry.
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_TORCH = "https://download.pytorch.org"
#: Parts of timm's names whose weights are in repositories of other names (timm 1.0.31).
_ELSEWHERE = "_fl", "deepseek", "eva", "_mci", "qwen", "radio", "sam2", "siglip_gap", "vitamin"


class _Download(NamedTuple):
    key: str
    what: str
    #: One of these servers has it.
    servers: tuple[str, ...]
    #: Where it is kept.
    folder: Path
    may_be_there: bool


def impossible_downloads(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return a line per download that is needed and impossible here, its remedy first.

    Empty if the file has other problems, as far as they are known without a child process. If other downloads
    may already be in a cache, the Hugging Face clients of child processes go offline.
    """
    try:
        with model_facts.only_cached():
            loaded = load(file, overrides)
            jobs = [variant.experiment for variant in expand(loaded)]
    except BadFileError:
        return []
    experiments = (job for job in jobs if isinstance(job, Experiment))
    downloads = dict.fromkeys(
        download for job in experiments for download in (*_of_data(job.data), *_of_model(job.model))
    )
    reasons = _no_network(frozenset(server for download in downloads for server in download.servers))
    unreachable = [download for download in downloads if reasons.keys() >= set(download.servers)]
    if unreachable:
        os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    return [
        loaded.problem(
            download.key,
            f"run `hpc-train prepare {loaded.source_name}` on a machine with network",
            f"{download.servers[0]} can't be reached from here ({reasons[download.servers[0]]}), and "
            f"{download.what} is not in {download.folder}",
            "prepare.offline",
        )
        for download in unreachable
        if not download.may_be_there
    ]


def _of_data(data: DataConfig) -> Iterator[_Download]:
    if data.root is None or not data_facts(data.name).is_downloaded:
        return
    root = expanded(data.root)
    with suppress(OSError):
        if not root.is_dir() or not any(root.iterdir()):
            is_of_hub = data_facts(data.name).is_on_hub
            # Data sets of torchvision are on many servers: if the two are reachable, so may be the others.
            servers = (_hub(),) if is_of_hub else (_TORCH, _hub())
            yield _Download("data.root", data.name, servers, root, may_be_there=False)


def _of_model(model: ModelConfig) -> Iterator[_Download]:
    provider, rest = split_name(model.name)
    name = rest.partition(".")[0]
    hub, torch = _hub_cache(), _torch_cache()
    if provider == "hf" and not expanded(rest).exists():
        is_there = any(hub.glob(f"models--{rest.replace('/', '--')}"))
        yield _Download("model.name", model.name, (_hub(),), hub, is_there)
    facts = provider_facts(model.name)
    if model.pretrained is not True or facts.weights_from is None:
        return
    is_there = not facts.names_weights or any(torch.glob(f"{name}*"))
    server, cache = _TORCH, torch
    if facts.weights_from == "hub":
        server, cache = _hub(), hub
        is_there |= any(hub.glob(f"models--*--{name}*")) or any(part in name for part in _ELSEWHERE)
    yield _Download("model.pretrained", f"a file of {model.name}", (server,), cache, is_there)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def _torch_cache() -> Path:
    home = os.environ.get("TORCH_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    return Path(home, "hub", "checkpoints").expanduser()


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _no_network(servers: Iterable[str]) -> dict[str, str]:
    """Return the servers that can't be reached and why. All are tried at the same time."""
    reached: list[str] = []
    reasons = dict.fromkeys(servers, f"no answer within {_LIMIT_S:g} s")

    def connect(server: str) -> None:
        try:
            socket.create_connection(_place(server), _LIMIT_S).close()
            reached.append(server)
        except OSError as error:
            reasons[server] = str(error)

    # The lookup of a name has no time limit of its own.
    threads = [threading.Thread(target=connect, args=[server], daemon=True) for server in reasons]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return {server: reason for server, reason in reasons.items() if server not in reached}


def _place(server: str) -> tuple[str, int]:
    """Return the host and port to connect to: of the server, or of the proxy before it."""
    url = urlsplit(server)
    proxy = "" if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme, "")
    if proxy:
        proxied = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        return proxied.hostname or "", proxied.port or 80
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
