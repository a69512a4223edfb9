from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_train.errors import UsageError
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.find import _LISTED, find_and_skip, find_runs, is_readable, is_run, run_name, run_names


def _make_run(experiment: str, run_id: str) -> Path:
    folder = runs_root() / experiment / run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}", encoding="utf-8")
    (folder / "experiment.yaml").touch()
    return folder


def _found(*words: str) -> list[Path]:
    return [paths.folder for paths in find_runs(words)]


@pytest.fixture
def folders() -> list[Path]:
    names = ("one/aaaa", "one/bbbb", "two/bbbb", "two/cccc")
    return [_make_run(*name.split("/")) for name in names]


def test_words_name_runs_and_experiments(folders: list[Path]) -> None:
    _make_run("two", ".dddd.0123abcd")  # only being made: not there yet
    assert _found("aaaa") == [folders[0]]
    assert _found("one") == folders[:2]
    assert _found("two/bbbb") == [folders[2]]
    assert _found() == folders
    assert _found("one", "aaaa", str(folders[0])) == folders[:2], "each run once"


def test_a_folder_is_a_run_or_experiment(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found(str(folders[2])) == [folders[2]]
    monkeypatch.chdir(folders[2].parent)
    assert _found("./bbbb") == [folders[2]]
    assert _found(".") == folders[2:]


@pytest.mark.parametrize("word", ["bbbb", "b"])
def test_an_id_of_several_experiments_is_refused_and_all_are_listed(folders: list[Path], word: str) -> None:
    with pytest.raises(UsageError) as error:
        find_runs([word])
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == ["one/bbbb", "two/bbbb"]


def test_a_long_list_of_runs_ends_with_the_number_of_others() -> None:
    for number in range(_LISTED + 3):
        _make_run(f"experiment-{number}", "same")
    with pytest.raises(UsageError, match=r"\n  and 3 more$"):
        find_runs(["same"])


def test_the_start_of_an_id_is_enough(folders: list[Path]) -> None:
    assert _found("c") == [folders[3]]
    assert _found("two/b") == [folders[2]]
    _make_run("one", "aaaa-2")
    assert _found("aaaa") == [folders[0]], "a whole id is not the start of another"


@pytest.mark.parametrize(
    ("word", "place"),
    [("latest", 1), ("-1", 1), ("-2", 2), ("latest-4", 3), ("two/latest", 2), ("one/-1", 1)],
)
def test_latest_is_the_run_that_started_last(folders: list[Path], word: str, place: int) -> None:
    times = ("2026-01-03", "2026-01-09", "2026-01-05", "2026-01-01")
    for folder, time in zip(folders, times, strict=True):
        (folder / "run.json").write_text(f'{{"created": "{time}T00:00:00+00:00"}}', encoding="utf-8")
    assert _found(word) == [folders[place]]


def test_of_runs_started_in_the_same_second_the_one_created_last_is_the_latest(folders: list[Path]) -> None:
    for folder, created in zip(folders, (1, 2, 4, 3), strict=True):
        os.utime(folder / "experiment.yaml", ns=(created, created))
    assert [_found(f"-{place}") for place in (1, 2, 3, 4)] == [[folders[index]] for index in (2, 3, 1, 0)]


@pytest.mark.parametrize(("name", "answer"), [("one", "write one"), ("four", "hpc-train submit .*exp.yaml")])
def test_a_file_is_answered_with_its_experiment(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, answer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(f"task: classification\nname: {name}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=answer):
        find_runs(["exp.yaml"])


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("aaab", "did you mean aaaa"),
        ("onee", "did you mean one"),
        ("-5", "-5: there are only 4 runs"),
        ("/", "contains no run"),
    ],
)
def test_a_word_that_names_no_run_is_refused(folders: list[Path], word: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        find_runs([word])


def test_the_name_of_a_run_finds_it_and_only_it(folders: list[Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "one" / "aaaa"
    elsewhere.parent.mkdir(parents=True)
    folders[0].rename(elsewhere)
    runs = [RunPaths(folder) for folder in (elsewhere, *folders[1:])]
    names = [run_name(paths) for paths in runs]
    assert names == [str(elsewhere), "one/bbbb", "two/bbbb", "cccc"]
    assert [find_runs([name]) for name in names] == [[paths] for paths in runs]
    assert run_names(runs) == dict(zip(runs, names, strict=True))


@contextmanager
def _without_privileges(*folders: Path) -> Iterator[None]:
    """Let this process be a user who can read all runs but ``folders``; root may read everything."""
    for folder in folders:
        folder.chmod(0o000)
    before = os.geteuid()
    if before == 0:
        for path in [runs_root(), *runs_root().parents]:
            if path.stat().st_mode & 0o055 != 0o055 and path.is_relative_to(_temporary()):
                path.chmod(0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
        for folder in folders:
            folder.chmod(0o755)


def _temporary() -> Path:
    return Path(*runs_root().parts[:3])


@pytest.mark.parametrize("which", ["experiment", "run"])
def test_what_can_not_be_read_is_skipped_and_named(folders: list[Path], which: str) -> None:
    hidden = folders[0].parent if which == "experiment" else folders[0]
    with _without_privileges(hidden):
        kept = folders[2:] if which == "experiment" else folders[1:]
        assert _found() == kept
        assert find_and_skip([])[1] == [hidden]
        with pytest.raises(UsageError, match="exists, but you may not read it"):
            find_runs([hidden.name])
        with pytest.raises(UsageError, match="exists, but you may not read it"):
            find_runs([str(hidden)])


def test_an_experiment_of_which_no_run_can_be_read_is_not_unknown(folders: list[Path]) -> None:
    with _without_privileges(*folders[2:]), pytest.raises(UsageError, match="you may not read it"):
        find_runs(["two"])


def test_a_run_whose_files_are_closed_is_skipped(folders: list[Path]) -> None:
    with _without_privileges(folders[1] / "run.json"):
        assert _found() == [folders[0], *folders[2:]]
        assert find_and_skip([])[1] == [folders[1]]


def test_an_executable_file_is_no_run(folders: list[Path]) -> None:
    file = folders[0] / "run.json"
    file.chmod(0o755)
    assert is_readable(RunPaths(file)) and not is_run(RunPaths(file))
    with pytest.raises(UsageError, match="is not a folder"):
        _found(str(file))
