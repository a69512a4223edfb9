from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_train
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.experiment.config.marked_yaml import MAX_BYTES
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.paths import expanded, runs_root
from tests.calls import count_calls
from tests.config.files import GOOD, code_and_key, problems_of
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_a_good_file_is_loaded_with_its_defaults(good: Path) -> None:
    loaded = load(good)
    assert loaded.experiment.optimization.optimizer.lr == 0.1
    assert loaded.experiment.checkpoint.keep == 3
    assert loaded.source_name == str(good)


@pytest.mark.parametrize("name", ["absent.yaml", "folder", "a\0b"])
def test_an_unreadable_file_is_one_problem_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadFileError) as caught:
        load(tmp_path / name)
    (line,) = caught.value.problems
    assert code_and_key(line) == ("file.unreadable", "")
    assert "\0" not in line and name.replace("\0", "\\x00") in line
    assert caught.value.exit_code == ExitCode.BAD_FILE == 65


def test_loading_imports_nothing_heavy(good: Path) -> None:
    code = (
        "import sys, pathlib; from hpc_train.experiment.validate.loading import load;"
        f"load(pathlib.Path({str(good)!r}));"
        "heavy = {'torch', 'numpy', 'timm', 'torchvision', 'wandb'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(hpc_train.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimization.optimizer.lr=1e-3", "optimization.optimizer.lr", 1e-3),
        ("optimization.optimizer={name: adamw, lr: 0.5}", "optimization.optimizer.name", "adamw"),
        ("slurm.nodes=2-4", "slurm.nodes", "2-4"),
        ("slurm.time_limit=24:00:00", "slurm.time_limit", 1440),
        ("environment.modules=[cuda/12, gcc]", "environment.modules", ["cuda/12", "gcc"]),
        ("model.args.a.b=on", "model.args", {"a": {"b": "on"}}),
        ("sweep.grid.optimization.optimizer.lr=[0.1]", "sweep.grid", {"optimization.optimizer.lr": [0.1]}),
        ("compile=true", "compile.enabled", True),
        ("compile.mode=max-autotune", "compile.mode", "max-autotune"),
        ("deterministic=", "deterministic", None),
        ("seed=null", "seed", 0),
        ("sweep.grid=null", "sweep.grid", {}),
        ("data.augment=", "data.augment", AugmentConfig()),
        ("slurm.time_limit=null", "slurm.time_limit", None),
        ("model.args.a=null", "model.args", {"a": None}),
        ("early_stopping={metric: val/loss, mode: min, patience: 3}", "early_stopping.metric", "loss"),
        ("checkpoint.best={metric: val/accuracy, mode: max}", "checkpoint.best.metric", "accuracy"),
    ],
)
def test_the_command_line_overrides_the_file(good: Path, override: str, path: str, value: object) -> None:
    found: object = load(good, [override]).experiment
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value


@pytest.mark.fault(23)
def test_problems_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    lines = problems_of(tmp_path, GOOD + "sed: 1\n", "optimization.epochs=0")
    assert [line.split(":")[0] for line in lines] == ["exp.yaml", "command line"]


def test_a_variant_is_the_file_with_other_values(good: Path) -> None:
    loaded = load(good, ["sweep.grid={seed: [1, 2], optimization.schedule.name: [cosine, linear]}"])
    run = loaded.variant({"seed": 2, "optimization.schedule.name": "linear"})
    assert (run.seed, run.optimization.schedule.name) == (2, "linear")
    assert loaded.experiment.seed == 0


def test_a_variant_that_breaks_a_rule_is_placed_at_its_value(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD + "sweep:\n  grid:\n    optimization.micro_batch_size: [16, 24]\n")
    loaded = load(path)
    loaded.variant({"optimization.micro_batch_size": 16})
    with pytest.raises(BadFileError) as caught:
        loaded.variant(
            {"optimization.micro_batch_size": 24},
            {"optimization.micro_batch_size": ("sweep", "grid", "optimization.micro_batch_size", 1)},
        )
    (line,) = caught.value.problems
    assert line.startswith(f"{path}:14:41: ")
    assert code_and_key(line) == ("batch.undivided", "sweep.grid.optimization.micro_batch_size[1]")


def test_many_runs_are_made_without_judging_the_grid_again(good: Path) -> None:
    small, large = (load(good, [f"sweep.grid={{seed: {list(range(size))}}}"]) for size in (50, 5000))

    def make_50_of(loaded: Loaded) -> None:
        assert [loaded.variant({"seed": seed}).seed for seed in range(50)] == list(range(50))

    assert count_calls(lambda: make_50_of(large)) < 1.1 * count_calls(lambda: make_50_of(small))


def test_settings_of_compile_go_beside_its_short_form(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD + "compile: false\n")
    compiled = load(path, ["compile.mode=max-autotune"]).experiment.compile
    assert (compiled.enabled, compiled.mode) == (False, "max-autotune")


def test_a_problem_found_later_is_placed_too(good: Path) -> None:
    loaded = load(good, ["seed=3"])
    assert loaded.problem("data.name", "is \x1b gone", "fetch it").endswith(
        "good.yaml:6:9: data.name: is \\x1b gone; fetch it"
    )
    assert loaded.problem(("seed",), "is odd", "write 4") == "command line: seed: is odd; write 4"
    assert "good.yaml:5:1: data.root: is missing" in loaded.problem("data.root", "is missing", "write one")


def test_no_more_of_a_file_is_read_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a terabyte would fill the memory before it is refused."""

    class Endless(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None and 0 < size <= MAX_BYTES + 1
            return b"#" * size

    monkeypatch.setattr(Path, "open", lambda *arguments, **options: Endless())
    with pytest.raises(BadFileError, match="larger than 1 MiB"):
        load(tmp_path / "exp.yaml")


def test_a_home_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", "~no-such-user/x")
    with pytest.raises(UsageError, match=r"'~no-such-user/x' .* write the folder's full path"):
        runs_root()
    assert expanded("~no-such-user/x") == Path("~no-such-user/x")
