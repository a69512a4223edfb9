from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import CheckpointConfig, Experiment
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import RunPaths
from hpc_train.run.frozen_experiment import dump, load_changed, read, write
from tests.config.files import GOOD, loaded_file

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "", "# a", "a: b", "- a", "1e-3", "on", "24:00:00", "null", "~", "<<", "0o17", ".inf", "!x", "&a",
        "*a", "yes",
    ]
)  # fmt: skip
FLOATS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SHARES = st.floats(0, 1, exclude_min=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True)


def optional(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


EXPERIMENTS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "task": st.just("classification"),
        "model": st.fixed_dictionaries(
            {"name": st.just("acme:tiny")}, optional={"args": st.dictionaries(NAMES, VALUES, max_size=3)}
        ),
        "data": st.fixed_dictionaries(
            {"name": st.just("synthetic"), "args": st.just({"channels": 2})},
            optional={
                "normalize": st.fixed_dictionaries(
                    {
                        "mean": st.lists(SHARES, min_size=2, max_size=2),
                        "std": st.lists(SHARES, min_size=2, max_size=2),
                    }
                ),
                "augment": optional(hflip=st.floats(0, 1), randaugment=optional(num_ops=st.integers(1, 8))),
            },
        ),
        "optimization": st.fixed_dictionaries(
            {
                "epochs": st.integers(1, 99),
                "global_batch_size": st.integers(1, 9).map(lambda n: n * 16),
                "micro_batch_size": st.sampled_from([1, 2, 4, 8, "auto"]),
                "optimizer": st.fixed_dictionaries({"name": st.just("sgd"), "lr": FLOATS}),
            }
        ),
    },
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "deterministic": st.none() | st.booleans(),
        "compile": st.booleans() | optional(enabled=st.booleans(), mode=st.just("max-autotune")),
        "slurm": optional(
            nodes=st.just("1-2"),
            time_limit=st.integers(1, 10**5).map(lambda minutes: f"{minutes}min"),
            extra=st.dictionaries(
                st.just("nice"), st.integers(1, 9) | st.sampled_from(["on", "1e-3", "24:00:00"])
            ),
        ),
        "logging": optional(every_steps=st.integers(1, 9)),
        "sweep": st.just({"grid": {"optimization.optimizer.lr": [0.1, 1e-7]}}),
    },
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(EXPERIMENTS)
def test_a_frozen_experiment_is_read_back_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    experiment = Experiment.model_validate(data)
    paths = RunPaths(tmp_path)
    write(paths, experiment)
    assert read(paths) == load_changed(paths, ()).experiment == experiment
    assert load(paths.experiment, check_names=False).experiment == experiment


def test_every_default_is_written_to_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    write(paths, loaded_file(tmp_path, "checkpoint.every_steps=5").experiment)
    monkeypatch.setattr(CheckpointConfig.model_fields["keep"], "default", 7)
    for section in (CheckpointConfig, Experiment):
        section.model_rebuild(force=True)
    try:
        assert CheckpointConfig().keep == 7
        assert read(paths).checkpoint.keep == load_changed(paths, ["seed=3"]).experiment.checkpoint.keep == 3
    finally:
        monkeypatch.undo()
        for section in (CheckpointConfig, Experiment):
            section.model_rebuild(force=True)


def test_a_damaged_file_is_refused_at_its_place(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, loaded_file(tmp_path).experiment)
    paths.resolved.write_text(paths.resolved.read_text().replace('"seed": 0', '"seed": "none"'))
    with pytest.raises(BadFileError, match=r"resolved\.json:3:\d+: seed"):
        read(paths)


def test_keys_keep_the_schemas_order_and_defaults_are_omitted(tmp_path: Path) -> None:
    overrides = ("slurm.time_limit=24:00:00", "compile=true", "checkpoint.keep=3")
    text = dump(loaded_file(tmp_path, *overrides, text="seed: 0\nprecision: bf16\n" + GOOD).experiment)
    keys = [line.partition(":")[0] for line in text.splitlines() if line[0] != " "]
    assert keys == ["name", "task", "model", "data", "optimization", "precision", "compile", "slurm"]
    assert "  time_limit: 24h\n" in text and "compile: true\n" in text


@pytest.mark.parametrize("text", ["1e-3", "on", "24:00:00", "y", "0o17", "2026-01-01", "1_000", "~"])
def test_text_like_other_types_is_quoted_for_every_reader(tmp_path: Path, text: str) -> None:
    frozen = dump(loaded_file(tmp_path, f"model.args.x='{text}'").experiment)
    assert f'x: "{text}"' in frozen
    assert yaml.safe_load(frozen)["model"]["args"]["x"] == text


def test_shared_values_are_written_out(tmp_path: Path) -> None:
    shared = [1, 2]
    frozen = dump(loaded_file(tmp_path).variant({"model.args": {"a": shared, "b": shared}}))
    assert "&" not in frozen and "*" not in frozen
