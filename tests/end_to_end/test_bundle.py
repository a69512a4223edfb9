"""A bundle is reproduced bitwise by another user elsewhere; whatever was changed, or differs, is named."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import bundle_archive
from hpc_train.run.checkpoints import FileEntry, Manifest, hash_file
from hpc_train.run.run_status import read_status, write_status
from tests.cli.json_checks import checked
from tests.end_to_end.runs import REPOSITORY, Done, hpc_train, only_run
from tests.end_to_end.test_bisect import TENSOR, flip_bit
from tests.end_to_end.test_evaluate import content
from tests.end_to_end.test_evaluate_elsewhere import write_images
from tests.end_to_end.test_replay import copy_run
from tests.slurm import containers, ordinary_user
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

USER = "adalovelace"
MODEL = """\
# After /srv/people/countess/notes.txt
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 4, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(256, num_classes)

    def forward(self, images):
        return self.head(self.body(images))
"""
FILE = """\
name: sealed
seed: 3
task: classification
model: {{name: "model:Net"}}
data: {{name: imagefolder, root: {data}, image_size: 32, args: {{channels: 1}}, augment: {{hflip: 0.5}}}}
optimization:
  steps: 12
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{name: adamw, lr: 0.003}}
  clip_grad_norm: 1.0
evaluation: {{images: 0}}
checkpoint: {{every_steps: 8, keep_every: 4, digests: parts, parts_every: 4}}
logging: {{every_steps: 1}}
slurm: {{mail: adalovelace@example.org, account: adalovelace}}
"""


@dataclass(frozen=True)
class Author:
    """The person who trained the run, with a home of their own."""

    home: Path
    run: RunPaths

    def command(self, *words: str | Path, **environment: str) -> Done:
        own = {
            "HOME": str(self.home),
            "USER": USER,
            "LOGNAME": USER,
            "HPC_TRAIN_RUNS": str(self.home / "runs"),
        }
        return hpc_train(*words, cwd=self.home / "project", **own | environment)

    def bundle(self, *words: str | Path, code: int = 0, **environment: str) -> dict[str, Any]:
        done = self.command("bundle", self.run.folder, *words, "--json", **environment)
        assert done.code == code, done.err + done.out
        answer: dict[str, Any] = checked("bundle", done.out)
        return answer


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Author:
    home = tmp_path_factory.mktemp("people") / USER
    project = home / "project"
    project.mkdir(parents=True)
    write_images(home / "pictures", 8, 3)
    (project / "model.py").write_text(MODEL)
    (project / "sealed.yaml").write_text(FILE.format(data=home / "pictures"))
    made = Author(home, RunPaths(home))
    done = made.command("submit", "sealed.yaml", "--local", "--devices", "2", "device=cpu")
    assert done.code == 0, done.err
    return replace(made, run=only_run(home))


@pytest.fixture(scope="module")
def archive(author: Author, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path does not contain the author's name."""
    target = tmp_path_factory.mktemp("mail") / "sealed.tar.gz"
    before = content(author.run)
    answer = author.bundle("-o", target, "--all-checkpoints")
    assert (answer["checkpoints"], answer["included"]) == ([4, 8, 12], ["data.root"])
    assert answer["left_out"] == {"sealed.yaml": "contains a path of this machine"}
    assert content(author.run) == before
    return target


def reproduced(
    archive: Path, *words: str | Path, code: int = 0, cwd: Path, **environment: str
) -> dict[str, Any]:
    done = hpc_train("reproduce", archive, *words, "--json", cwd=cwd, **environment)
    assert done.code == code, done.err + done.out
    answer: dict[str, Any] = checked("reproduce", done.out)
    return answer


def named(answer: dict[str, Any]) -> dict[str, tuple[str, str | None, str | None, bool]]:
    return {
        one["name"]: (one["kind"], one["bundle"], one["here"], one["matters"])
        for one in answer["differences"]
    }


def test_the_same_run_gives_the_same_bytes_without_names_and_paths(
    author: Author, archive: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.tar.gz"
    author.bundle("-o", again, "--all-checkpoints", WANDB_API_KEY="0123456789abcdef")
    assert again.read_bytes() == archive.read_bytes()
    private = [
        str(author.home),
        str(author.home.parent),
        str(archive.parent),
        USER,
        f'"{os.uname().nodename}"',
    ]
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            file = opened.extractfile(member)
            assert file is not None and member.isfile()
            text = file.read()
            for word in private:
                assert word.encode() not in text and word not in member.name, (word, member.name)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that another user can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-home-"))
    yield folder
    shutil.rmtree(folder)


def assert_reproduced(done: Done, begin: int = 0) -> None:
    """The steps after ``begin`` are bitwise identical; nothing but Python's own version may differ."""
    assert done.code == 0, done.err + done.out
    answer = checked("reproduce", done.out)
    # The logger of tests is installed for the author alone.
    assert answer["verdict"] == "bitwise" and {key for key, one in named(answer).items() if one[3]} <= {
        "python"
    }
    repeated = answer["reproduction"]
    assert (repeated["checkpoint"], repeated["ranks"], repeated["compared"]) == (begin, 2, 12 - begin)
    assert repeated["equal_checkpoints"] == [step for step in (4, 8, 12) if step > begin]
    assert (repeated["equal_parts"], repeated["other_parts"]) == (len(repeated["equal_checkpoints"]), None)


def test_another_user_elsewhere_gets_the_same_weights(archive: Path, home: Path) -> None:
    """In a fresh environment, whose Python is the system's."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    user = ordinary_user.make(home)
    if user.python is None:
        pytest.skip("no Python that another user may execute")
    copy = home / "sealed.tar.gz"
    shutil.copy(archive, copy)
    shutil.chown(copy, user.name)
    done = subprocess.run(
        [str(user.python), "-m", "hpc_train", "reproduce", str(copy), "--trust", "--json"],
        cwd=home,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(home), **user.environment},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
        user=user.name,
        group=pwd.getpwnam(user.name).pw_gid,
        extra_groups=[],
    )
    assert_reproduced(Done(done.returncode, done.stdout, done.stderr))
    assert not [path for path in home.iterdir() if path.name.startswith("hpc-train-")]


def in_container(home: Path, *words: str, search_path: str = "/opt/hpc-train") -> Done:
    """Run hpc-train in Debian's image without a network, as a user without a name; ``home`` is its /mail."""
    mounts = (containers.packages(), f"{REPOSITORY}:/opt/hpc-train:ro", f"{home}:/mail:ro")
    limits = {
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "nproc": (4096, 4096),
    }  # podman's own may be above this process's
    options = [
        "--network=none", "--user=4711:4711", "--tmpfs=/home/ada:mode=1777", "--workdir=/home/ada",
        "--env=HOME=/home/ada", "--env=TMPDIR=/home/ada", f"--env=PYTHONPATH={search_path}",
        "--cgroups=disabled", "--security-opt=label=disable", "--log-driver=none", "--entrypoint=",
        *(f"--ulimit={name}={soft}:{hard}" for name, (soft, hard) in limits.items()),
        *(f"--volume={mount}" for mount in mounts), "--rootfs", f"{containers.image()}:O",
    ]  # fmt: skip
    with FileLock(Path(tempfile.gettempdir()) / "hpc-train-test-containers.lock"):
        done = subprocess.run(
            ["podman", "run", "--rm", *options, "python3", "-m", "hpc_train", *words, "--json"],
            env=os.environ | {"PATH": f"{home}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT_S,
            check=False,
        )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_stranger_in_a_container_gets_the_same_weights_and_sees_what_was_changed(
    author: Author, archive: Path, home: Path, tmp_path: Path
) -> None:
    """Without a network; the Python and all libraries but the packages are the image's."""
    containers.put_podman(home / "bin")
    home.chmod(0o755)
    copy = home / "sealed.tar.gz"
    shutil.copy(archive, copy)
    copy.chmod(0o644)
    file = f"/mail/{copy.name}"
    assert_reproduced(in_container(home, "reproduce", file, "--trust", "--from", "9"), begin=8)
    shutil.copytree(author.home / "pictures", home / "pictures")
    changed_data(home / "pictures")
    done = in_container(home, "reproduce", file, "--trust", "--data", "/mail/pictures")
    assert done.code == 1, done.err
    changed = named(checked("reproduce", done.out))["data.root"]
    assert changed == ("data", None, "train/ant/3.png was changed", True)
    write_other_timm(home / "packages")
    done = in_container(home, "reproduce", file, search_path="/mail/packages:/opt/hpc-train")
    kind, _, here, matters = named(checked("reproduce", done.out))["timm"]
    assert (done.code, kind, here, matters) == (2, "package", "0.0.1", True), done.err
    write_damaged(archive, tmp_path / "out", home / "bad.tar")
    (home / "bad.tar").chmod(0o644)
    done = in_container(home, "reproduce", "/mail/bad.tar", "--trust")
    assert done.code != 0 and " is damaged: its hash is not the manifest's" in done.err, done.err


def test_without_trust_nothing_runs_and_the_files_can_be_looked_at(archive: Path, tmp_path: Path) -> None:
    done = hpc_train("reproduce", archive, "-o", tmp_path / "out", cwd=tmp_path)
    assert done.code == 2 and f"nothing was run: --trust executes the code in {archive}" in done.err
    assert "imports model:Net" in done.err and "all " in done.err
    run = only_run(tmp_path / "out")
    assert (run.code / "tree" / "model.py").read_text() == MODEL
    assert not (run.code / "tree" / "sealed.yaml").exists() and not run.attempts.exists()
    again = hpc_train("reproduce", archive, "-o", tmp_path / "out", cwd=tmp_path)
    assert again.code == 2 and "exists; give a new folder" in again.err


@pytest.fixture
def other_timm(tmp_path: Path) -> Iterator[str]:
    """An environment in which metadata of another version come first."""
    yield write_other_timm(tmp_path / "packages")


def write_other_timm(folder: Path) -> str:
    info = folder / "timm-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.0.1\n")
    return str(folder)


def test_another_version_is_named_and_a_stretch_is_repeated(
    archive: Path, tmp_path: Path, other_timm: str
) -> None:
    answer = reproduced(
        archive,
        "--trust",
        "--from",
        "6",
        "--to",
        "10",
        cwd=tmp_path,
        PYTHONPATH=other_timm,
        OMP_NUM_THREADS="2",
    )
    kind, _, here, matters = named(answer)["timm"]
    assert (kind, here, matters) == ("package", "0.0.1", True)
    assert answer["verdict"] == "bitwise", "with the run's number of threads"
    own = answer["reproduction"]
    assert (own["checkpoint"], own["compared"], own["equal_checkpoints"]) == (4, 6, [8])


def test_on_other_ranks_losses_are_compared(archive: Path, tmp_path: Path) -> None:
    answer = reproduced(archive, "--trust", "--devices", "1", cwd=tmp_path)
    assert named(answer)["ranks"] == ("ranks", "2", "1", True) and answer["verdict"] == "tolerance"
    losses = answer["losses"]
    assert (losses["first"], losses["last"], losses["tolerance"]) == (12, 12, 0.05)
    assert losses["difference"] <= 0.05 and answer["place"] is not None


def changed_data(root: Path) -> None:
    file = root / "train" / "ant" / "3.png"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)


DATA: dict[str, Callable[[Path], object]] = {
    "train/ant/3.png was changed": changed_data,
    "train/ant/3.png is missing": lambda root: (root / "train/ant/3.png").unlink(),
    "train/ant/x.png is new": lambda root: shutil.copy(root / "train/ant/3.png", root / "train/ant/x.png"),
}


@pytest.mark.parametrize("is_included", [True, False], ids=["included", "not included"])
def test_changed_data_are_named(is_included: bool, author: Author, archive: Path, tmp_path: Path) -> None:
    file = archive
    if not is_included:
        file = tmp_path / "run.tar"
        assert author.bundle("-o", file, "--max-data", "0")["not_included"] == ["data.root"]
        done = hpc_train("reproduce", file, cwd=tmp_path)
        assert done.code == 2 and "does not contain the files of data.root; add --data PATH" in done.err
    changes = list(DATA.items())[: 1 if is_included else None]
    for number, (text, change) in enumerate(changes):
        folder = f"pictures-{number}"
        shutil.copytree(author.home / "pictures", tmp_path / folder)
        change(tmp_path / folder)
        answer = reproduced(file, "--trust", "--data", folder, code=1, cwd=tmp_path)
        assert named(answer)["data.root"] == ("data", None, text, True) and answer["reproduction"] is None


def pack(bundle: bundle_archive.Bundle, folder: Path, target: Path) -> None:
    files: dict[str, Path | bytes] = {path: folder / path for path in bundle.members}
    bundle_archive.write(target, bundle.facts, files, set())


def write_damaged(archive: Path, folder: Path, target: Path) -> tuple[bundle_archive.Bundle, Path]:
    """Write a bundle with a flipped bit in the last checkpoint; return it and the shard, in ``folder``."""
    folder.mkdir()
    bundle = bundle_archive.extract(archive, folder)
    checkpoint = CheckpointPaths(folder / "run" / "checkpoints" / "step-00000012")
    shard = checkpoint.shard(flip_bit(checkpoint))
    pack(bundle, folder, target)
    return bundle, shard


def test_a_changed_checkpoint_is_refused_and_one_with_new_hashes_named(archive: Path, tmp_path: Path) -> None:
    """Whoever changes a bit can compute all hashes again, but not the run."""
    folder, bad = tmp_path / "out", tmp_path / "bad.tar"
    bundle, shard = write_damaged(archive, folder, bad)
    done = hpc_train("reproduce", bad, "--trust", cwd=tmp_path)
    assert (
        done.code != 0 and f"{shard.name} is damaged: its hash is not the manifest's" in done.err + done.out
    )
    checkpoint = CheckpointPaths(shard.parent)
    manifest = Manifest.read(checkpoint)
    entry = FileEntry(shard.stat().st_size, hash_file(shard))
    replace(manifest, files=manifest.files | {shard.name: entry}).write(checkpoint)
    pack(bundle, folder, bad)
    answer = reproduced(bad, "--trust", "--from", "9", code=1, cwd=tmp_path)
    place = answer["place"]
    assert (place["step"], place["where"], place["tensor"]) == (12, "checkpoint", TENSOR)
    assert answer["verdict"] == "differs"


def test_what_may_not_be_published_and_what_cant_be_reproduced_is_refused(
    author: Author, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path / "runs" / "sealed" / author.run.folder.name)
    run.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(author.run, run)
    copied = replace(author, run=run)

    def refusal(*words: str, **environment: str) -> tuple[int, str]:
        own = ("-o", str(tmp_path / "x.tar")) if "-o" not in words else ()
        done = copied.command("bundle", run.folder, *own, *words, **environment)
        assert not (tmp_path / "x.tar").exists()
        return done.code, done.err

    def fails(text: str, code: int, *words: str, **environment: str) -> None:
        ended, err = refusal(*words, **environment)
        assert ended == code and text in err, err

    fails("a bundle's name ends in .tar.zst", 2, "-o", str(tmp_path / "run.zip"))
    fails("code/tree/model.py: contains a password, key or token", 1, WANDB_API_KEY="nn.Sequential")
    fails("code/tree/model.py: contains /srv/people/countess", 1, HOME="/srv/people/countess")
    picture = author.home / "pictures" / "train" / "ant" / "3.png"
    before = picture.read_bytes()
    changed_data(author.home / "pictures")
    fails("data.root: the files are not those that", 1)
    picture.write_bytes(before)
    ended = read_status(run)
    write_status(run, replace(ended, state="running"))
    fails("is running, and its files change", 2)
    write_status(run, ended)
    shutil.rmtree(run.checkpoints)
    fails("has no checkpoint", 2)
