"""The reference has a row for every check that ``doctor`` makes."""

from __future__ import annotations

import re

from tests.docs.pages import REPOSITORY

PACKAGE = REPOSITORY / "hpc_train"
_MODULES = {
    "launchers/slurm/cluster_checks.py": "slurm",
    "launchers/slurm/check_job.py": "slurm",
    "launchers/machine_checks.py": "machine",
    "cli/doctor.py": "",
}
_NAME = re.compile(r'"((?:slurm|machine|wandb|notify|launcher|file)\.[a-z-]+)"')
#: The helpers that put the module's own prefix before a name.
_SHORT_NAME = re.compile(r'(?:fine\(|setting\(\s*|finding\(\s*Level\.\w+,\s*)"([a-z-]+)"')


def checks() -> set[str]:
    names: set[str] = set()
    for module, prefix in _MODULES.items():
        text = (PACKAGE / module).read_text(encoding="utf-8")
        names |= set(_NAME.findall(text)) | {f"{prefix}.{name}" for name in _SHORT_NAME.findall(text)}
    return names


def test_the_table_of_checks_is_complete() -> None:
    page = (REPOSITORY / "docs/reference_commands.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| check \| finds \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    rows = {
        name
        for row in table.strip().splitlines()
        for name in re.findall(r"`([a-z]+\.[a-z-]+)`", row.split("|")[1])
    }
    assert len(checks()) > 20
    assert rows == checks()
