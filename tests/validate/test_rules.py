from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.validate import model_facts, part_rules
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.rules import check_start
from hpc_train.experiment.validate.slurm_rules import MEMORY_SHARES, OWNED, SBATCH_KEYS
from hpc_train.registry import parts
from tests.config.files import GOOD, code_and_key, problems_of


@pytest.mark.parametrize("option", OWNED)
def test_slurm_options_of_the_launcher_are_refused(tmp_path: Path, option: str) -> None:
    for written in (option, option.replace("-", "_"), option[:-1]):
        (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{written}=x")
        assert code_and_key(line) == ("slurm.extra-option", f"slurm.extra.{written}")


@pytest.mark.parametrize("option", sorted(set(SBATCH_KEYS) - {"gres", *MEMORY_SHARES}))
def test_slurm_options_with_a_key_name_it(tmp_path: Path, option: str) -> None:
    (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{option}=1")
    assert f"write {SBATCH_KEYS[option]}" in line


def _file(model: str, parallel: str) -> str:
    return f"{GOOD.replace('acme.models:tiny', model)}parallel: {parallel}\n"


def test_a_model_is_not_asked_about_where_that_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model_facts, "facts", lambda name, args: asked.append(name))
    path = tmp_path / "exp.yaml"
    for parallel in ("{strategy: fsdp}", "{strategy: tensor, tensor: 1}", "{strategy: tensor, tensor: 2}"):
        path.write_text(_file("timm/test_resnet", parallel))
        experiment = load(path, check_names=False).experiment
        assert check_start(experiment, 1 if "2" not in parallel else None) == []
    assert not asked


def test_degrees_of_a_plug_in_that_ignores_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = {"by_parameter": "acme:ByParameter"}
    monkeypatch.setattr(part_rules, "parts", lambda kind: parts(kind) | plugins)
    own = "parallel={strategy: by_parameter, args: {buckets: 3}}"
    assert problems_of(tmp_path, GOOD, own) == []
    (line,) = problems_of(tmp_path, GOOD, own, "parallel.shard=2")
    assert code_and_key(line) == ("parallel.degree", "parallel.shard") and "parallel.args" in line


def test_the_environment_may_have_the_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:hunter2@x.org")
    assert problems_of(tmp_path, GOOD, "logging.mlflow={}") == []
