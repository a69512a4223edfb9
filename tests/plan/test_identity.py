from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.plan.sweep import changes_identity, content_hash, run_id
from tests.plan.files import loaded


def test_an_id_is_ten_hexadecimal_digits_of_the_hash(tmp_path: Path) -> None:
    experiment = loaded(tmp_path).experiment
    assert run_id(experiment) == content_hash(experiment)[:10]
    assert len(content_hash(experiment)) == 64


def test_an_id_stays_what_it_was_in_earlier_versions(tmp_path: Path) -> None:
    # Changing this makes every user's finished runs train again.
    file = loaded(tmp_path, "model.name=some.module:build")
    assert run_id(file.experiment) == "75750e4a00"


#: Keys that are not in the id, and defaults written out.
SAME_RUN = [
    "name=other", "device=auto", "environment.modules=[cuda]", "logging.every_steps=3", "checkpoint.keep=7",
    "sweep.grid={seed: [1, 2]}", "slurm.nodes=4", "data.root=elsewhere", "data.workers=5", "seed=0",
    "compile=false", "data.augment={hflip: 0.0}", "optimization.schedule={name: constant}", "sweep={}",
]  # fmt: skip
ANOTHER_RUN = [
    "seed=1", "deterministic=true", "precision=bf16", "parallel.strategy=fsdp",
    "optimization.optimizer.lr=0.2", "data.args.num_samples=101", "data.transform=my_transforms:train",
    "evaluation.every_epochs=2", "compile=true",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "is_same"), [(key, True) for key in SAME_RUN] + [(key, False) for key in ANOTHER_RUN]
)
def test_which_keys_make_another_id(tmp_path: Path, override: str, is_same: bool) -> None:
    plain = run_id(loaded(tmp_path).experiment)
    assert (run_id(loaded(tmp_path, override).experiment) == plain) is is_same


def test_how_images_are_read_keeps_the_id(tmp_path: Path) -> None:
    data = "data={name: imagefolder, root: images, image_size: 8%s}"
    plain = run_id(loaded(tmp_path, data % "").experiment)
    assert run_id(loaded(tmp_path, data % ", cache: packs, stage: true").experiment) == plain


def test_a_resumed_run_may_change_how_it_is_spread_but_not_what_it_learns(tmp_path: Path) -> None:
    old = loaded(tmp_path).experiment
    allowed = loaded(tmp_path, "parallel.strategy=fsdp", "data.workers=3", "logging.every_steps=1").experiment
    assert changes_identity(old, allowed) == []
    refused = loaded(tmp_path, "optimization.optimizer.lr=0.2", "seed=4").experiment
    assert changes_identity(old, refused) == ["seed", "optimization.optimizer.lr"]
