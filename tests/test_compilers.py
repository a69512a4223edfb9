"""The compiler of tests gives what the real one does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import compilers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on this machine"),
]


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    made = compilers.make(tmp_path / "compiler")
    assert made is not None
    return made


def run(compiler: Path, folder: Path, text: str, *options: str) -> int:
    """Compile ``text`` in a folder of its own and return the exit code of the program."""
    folder.mkdir(exist_ok=True)
    (folder / "main.cpp").write_text(text)
    output = folder / "program"
    subprocess.run([compiler, folder / "main.cpp", *options, "-o", output], check=True)
    return subprocess.run([output], check=False).returncode


def num_kept(compiler: Path) -> int:
    return len(list((compiler.parent / "kept").iterdir()))


def test_the_same_text_is_compiled_once_wherever_it_is(compiler: Path, tmp_path: Path) -> None:
    text = "int main() { return 3; }\n"
    assert [run(compiler, tmp_path / folder, text) for folder in ("one", "other")] == [3, 3]
    assert num_kept(compiler) == 1


def test_another_text_or_option_is_another_program(compiler: Path, tmp_path: Path) -> None:
    text = "int main() { return CODE; }\n"
    assert run(compiler, tmp_path / "one", text, "-DCODE=3") == 3
    assert run(compiler, tmp_path / "one", text, "-DCODE=4") == 4
    assert run(compiler, tmp_path / "one", text + "// another\n", "-DCODE=4") == 4
    assert num_kept(compiler) == 3


def test_what_fails_fails_each_time_and_is_not_kept(compiler: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            run(compiler, tmp_path / "one", "no program\n")
    assert num_kept(compiler) == 0
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    assert "g++" in version.stdout
