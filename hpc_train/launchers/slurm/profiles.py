"""Site profiles: one cluster's settings for jobs, each a small file ``<name>.yaml`` of a site or user.

Its lines are run unchanged, so a file that others could change is refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import ValidationError

from hpc_train.console import one_line
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import ScriptPath, Section, pattern
from hpc_train.experiment.config.keys import as_mapping, child, value_at
from hpc_train.experiment.config.marked_yaml import EMPTY, MAX_BYTES, read_document
from hpc_train.experiment.config.problems import KeyPath, Problem, Source, is_clean, shown
from hpc_train.experiment.config.remedies import wanted
from hpc_train.experiment.config.schema import Job, SlurmConfig
from hpc_train.experiment.validate import slurm_rules
from hpc_train.registry import nearest, suggestion

#: Keys of ``slurm:`` that a profile may fill in: they affect neither the number of ranks nor the training.
DEFAULTS = (
    "partition", "account", "qos", "constraint", "exclude", "reservation", "gpu_type", "cpus_per_gpu",
    "mem_gb", "time_limit", "signal_lead_s", "mail",
)  # fmt: skip
#: Set by the batch script itself, or by Slurm.
_OWNED_VARIABLES = ("HPC_TRAIN_", "SLURM_", "SUBMITIT_", "PYTHONPATH", "PYTHONSAFEPATH")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_INTERFACES = r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}(,[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}){0,15}"
_COMMAND = r"[A-Za-z0-9_./=:,@%+-]+( [A-Za-z0-9_./=:,@%+-]+){0,31}"
_OPTION = r"--[a-z][a-z0-9-]{0,63}(=[A-Za-z0-9_.,:@+*/%-]{1,256})?"
#: Package data; in a checkout a link to the repository's ``slurm_templates/``.
TEMPLATES = Path(__file__).with_name("templates")


class Profile(Section):
    """A site's settings for jobs. All keys have a default."""

    description: str = ""
    """What the profile is for."""
    gpus: Literal["gpus_per_node", "gres"] = "gpus_per_node"
    """How GPUs are asked for: ``--gpus-per-node=a100:4``, or ``--gres=gpu:a100:4``."""
    defaults: SlurmConfig = SlurmConfig()
    """Keys of ``slurm:`` for files without them: partition, account, qos, constraint, exclude,
    reservation, gpu_type, cpus_per_gpu, mem_gb, time_limit, signal_lead_s, mail."""
    sbatch: dict[str, str | int | bool] = {}
    """More options of sbatch by long name, as in ``slurm.extra``, which goes before."""
    srun_args: list[Annotated[str, pattern(_OPTION, "one long option like --mpi=none")]] = []
    """More options of srun."""
    module_init: ScriptPath | None = None
    """File that defines ``module`` for bash; default: the usual places."""
    setup: list[str] = []
    """Lines of bash, run on the first node before anything else."""
    environment: dict[str, str | int] = {}
    """Variables of all ranks, unchanged (nothing is expanded): NCCL_IB_HCA and its kind."""
    network_interface: Annotated[str, pattern(_INTERFACES, "interfaces like ib0 or eth0,eth1")] | None = None
    """Interface through which nodes talk, for NCCL and gloo; default: their own choice."""
    container_command: Annotated[str, pattern(_COMMAND, "words like apptainer exec --nv")] = (
        "apptainer exec --nv"
    )
    """The program that runs a command in ``environment.container``: Apptainer or Singularity."""

    def applied(self, experiment: Job) -> Job:
        """Return the experiment with the profile's defaults for keys that it does not set."""
        slurm = experiment.slurm
        assert slurm is not None
        defaults = {key: getattr(self.defaults, key) for key in DEFAULTS if getattr(slurm, key) is None}
        if any(slurm_rules.sbatch_option(key) in slurm_rules.MEMORY_SHARES for key in slurm.extra):
            defaults.pop("mem_gb", None)
        return experiment.model_copy(update={"slurm": slurm.model_copy(update=defaults)})

    def variables(self) -> dict[str, str]:
        """Return the variables that the batch script exports."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.network_interface else ()
        interface = {name: str(self.network_interface) for name in names}
        return interface | {name: str(value) for name, value in self.environment.items()}


def find(name: str, problem: Callable[[str, str, str], str] | None = None) -> Profile:
    """Return the profile called ``name``, from the first folder that has one.

    Raises BadFileError: the profile's own problems, or that there is none, which ``problem`` places at
    ``slurm.profile`` of the experiment file.
    """
    for folder in folders():
        path = folder / f"{name}.yaml"
        if path.is_file():
            if folder != TEMPLATES / "profiles":
                _refuse_writable_by_others(path)
            return read(path)
    message = f"no profile is called '{name}'"
    close = nearest(name, known_names())
    hint = f"did you mean {close}? " if close else f"there are {', '.join(known_names())}; "
    remedy = f"{hint}{name}.yaml is looked for in {', '.join(map(str, folders()))}"
    where = "slurm.profile"
    raise BadFileError(problem(where, message, remedy) if problem else f"{where}: {message}; {remedy}")


def slurm_of(experiment: Job) -> SlurmConfig | None:
    """Return the section ``slurm`` with its profile's defaults, or as written if it is unusable; or None."""
    slurm = experiment.slurm
    if slurm is None:
        return None
    try:
        return find(slurm.profile).applied(experiment).slurm
    except BadFileError:
        return slurm


def folders() -> list[Path]:
    """Return the folders of profiles: ``$HPC_TRAIN_PROFILES``, the user's, the machine's, the package's."""
    parts = os.environ.get("HPC_TRAIN_PROFILES", "").split(os.pathsep)
    from_environment = [Path(part) for part in parts if part]
    usual = [platformdirs.user_config_path("hpc-train") / "profiles", Path("/etc/hpc-train/profiles")]
    return [path.expanduser().absolute() for path in (*from_environment, *usual, TEMPLATES / "profiles")]


def known_names() -> list[str]:
    """Return the names of all profiles that can be found."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def read(path: Path) -> Profile:
    """Read one file. Raises BadFileError with every problem, each at its place."""
    try:
        state = path.stat()
        return _read(path, (state.st_mtime_ns, state.st_size, state.st_ino))
    except OSError as error:
        raise BadFileError(one_line(f"{path}: can't be read ({error.strerror}); fix the profile")) from error


@lru_cache(maxsize=16)  # each run of a sweep has it
def _read(path: Path, _state: tuple[int, ...]) -> Profile:
    with path.open("rb") as file:
        document = read_document(file.read(MAX_BYTES + 1))
    problems, data = document.problems, document.data or {}
    if document.data is None and problems[0].code == EMPTY:
        problems = []
    profile = None
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        problems += _explained(error, data)
    if profile is not None:
        problems += _contradictions(profile)
    if profile is None or problems:
        raise BadFileError(Source(str(path), document.marks).render_all(problems))
    return profile


def _refuse_writable_by_others(path: Path) -> None:
    for checked in (path, path.parent):
        mode = checked.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            message = f"others than its owner can write it (mode {stat.S_IMODE(mode):04o})"
            remedy = f"its lines run in your jobs, so type chmod go-w {checked}"
            raise BadFileError(one_line(f"{checked}: {message}; {remedy}"))


def _explained(error: ValidationError, data: dict[str, Any]) -> list[Problem]:
    schema = Profile.model_json_schema()
    by_path: dict[KeyPath, Problem] = {}
    for entry in error.errors(include_url=False):
        path, node = _known_part(schema, entry["loc"])
        if entry["type"] == "extra_forbidden":
            name, keys = str(entry["loc"][-1]), list((as_mapping(node) or {}).get("properties", {}))
            remedy = suggestion(name, keys, f"take it out, or write one of {', '.join(keys)}")
            path, code = (*path, entry["loc"][-1]), "profile.unknown-key"
            new = Problem(path, "unknown key of a profile", remedy, on_key=True, code=code)
        elif entry["type"] == "value_error":
            message, _, remedy = str(entry["ctx"]["error"]).partition("; ")
            new = Problem(path, message, remedy, code="profile.value")
        else:
            message = f"needs {wanted(node)}, got {shown(value_at(data, path))}"
            new = Problem(path, message, "write that, or take it out", code="profile.value")
        by_path.setdefault(new.path, new)
    return list(by_path.values())


def _known_part(schema: dict[str, Any], loc: KeyPath) -> tuple[KeyPath, dict[str, Any]]:
    path: KeyPath = ()
    node = schema
    for segment in loc:
        below = child(node, segment)
        if below is None:
            break
        path, node = (*path, segment), below
    return path, node


def _contradictions(profile: Profile) -> Iterator[Problem]:
    for key in sorted(profile.defaults.model_fields_set - set(DEFAULTS)):
        remedy = f"leave it to the experiment file; defaults are of {', '.join(DEFAULTS)}"
        yield Problem(("defaults", key), "can't have a default", remedy, on_key=True, code="profile.default")
    for key in profile.sbatch:
        if not _OPTION_NAME.fullmatch(key):
            message, remedy = "is no option of sbatch", "write a long name"
            yield Problem(("sbatch", key), message, remedy, on_key=True, code="profile.sbatch")
    yield from slurm_rules.taken_options(profile.sbatch, ("sbatch",))
    yield from slurm_rules.bad_option_values(profile.sbatch, ("sbatch",))
    unclean = "has a control character or line break"
    for name, value in profile.environment.items():
        path, code = ("environment", name), "profile.environment"
        if not _VARIABLE.fullmatch(name):
            yield Problem(path, "is no variable's name", "write one like NCCL_DEBUG", on_key=True, code=code)
        elif name.startswith(_OWNED_VARIABLES):
            yield Problem(path, "is set by hpc-train or Slurm", "take it out", on_key=True, code=code)
        elif isinstance(value, str) and not is_clean(value):
            yield Problem(path, unclean, "take it out", code=code)
    for index, line in enumerate(profile.setup):
        if not is_clean(line.replace("\t", " ")):
            yield Problem(("setup", index), unclean, "write a line an item", code="profile.setup")
