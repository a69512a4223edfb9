from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.redaction import MARK, is_secret, redacted

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.delenv("WANDB_CONFIG_DIR", raising=False)


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("API_KEY", "0123456789abcdef0123", True),
    ("db_password", "hunter2", True),
    ("", "--token=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", True),
    ("DB", "sql://me:hunter2@host/x", True),
    ("REPO", "ssh://git@host/x", False),
    ("API_KEY", "{name}-0123456789abcdef", False),
    ("MAX_TOKENS", "1000000000000000000", False),
    ("TOKENIZER", "gpt2-0123456789abcdef", False),
    ("SORT_KEY", "validation_loss_mean", False),
    ("TOKEN_FILE", "0123456789abcdef.txt", False),
    ("HF_TOKEN", "/home/me/token-0123456", False),
])  # fmt: skip
def test_a_secret_in_a_file_is_told_by_its_name_and_form(name: str, value: str, expected: bool) -> None:
    assert is_secret(name, value) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://me:hunter2@host:80/x.", "at http://host:80/x."),
        ("at http://me:p@hunter2@host/x", "at http://host/x"),
        ("at http://me:hun@ter/hunter2@host/x", "at http://host/x"),
        ("at http://me:a#hunter2@host/x", "at http://host/x"),
        ("at http://hunter2@host", "at http://host"),
        ("'postgresql+psycopg2://me:hunter2@[::1]:5432/db'", "'postgresql+psycopg2://[::1]:5432/db'"),
        ("http://host/?a=1&password=hunter2&b=2", f"http://host/?a=1&password={MARK}&b=2"),
        ("http://host/?api_key=hunter2", f"http://host/?api_key={MARK}"),
        ("two: http://me:hunter2@a and https://me:hunter2@b", "two: http://a and https://b"),
        ("http://host/@someone/repo?tab=x", "http://host/@someone/repo?tab=x"),
        ("mail me@host.org", "mail me@host.org"),
    ],
)
def test_a_url_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "MY_SECRET",
        "AWS_SECRET_ACCESS_KEY",
        "API_KEY_2",
    ],
)
def test_the_value_of_a_secret_variable_is_known(name: str) -> None:
    assert redacted(f"refused: {SECRET}!", {name: SECRET}) == f"refused: {MARK}!"


def test_the_quoted_form_and_the_password_of_a_url_are_known() -> None:
    assert redacted("p%40ss%2Fword", {"A_PASSWORD": "p@ss/word"}) == MARK
    assert redacted("user me, password p@ss", {"MLFLOW_TRACKING_URI": "http://me:p%40ss@host"}) == (
        f"user me, password {MARK}"
    )
    assert redacted("bad p@ss word", {"HTTPS_PROXY": "http://me:p@ss@host"}) == f"bad {MARK} word"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_IDENTITY_TOKEN_FILE", "hunter2"),
        ("MLFLOW_MYSQL_SSL_KEY", "/hunter2"),
        ("SHELL", "hunter2"),
        ("MY_KEY", "2"),
    ],
)
def test_what_is_no_secret_stays(name: str, value: str) -> None:
    assert redacted("/hunter2 2", {name: value}) == "/hunter2 2"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (".netrc", "machine host login me password hunter2\n"),
        (".netrc", 'machine host\n\tlogin me\n\tpassword "hunter2"'),
        ("_netrc", "machine host login me password hunter2\n"),
        (".config/wandb/settings", "[default]\napi_key = hunter2\n"),
        (".mlflow/credentials", "[mlflow]\nmlflow_tracking_password = hunter2\n"),
    ],
)
def test_a_secret_of_a_file_is_known(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert redacted("refused: hunter2", {}) == f"refused: {MARK}"


def test_the_longer_of_two_secrets_is_replaced_whole() -> None:
    assert redacted("abcdefgh", {"A_KEY": "abcd", "B_KEY": "abcdefgh"}) == MARK


def test_a_user_without_a_home_folder_has_no_files_of_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a numeric user id."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert redacted("http://me:hunter2@host/x") == "http://host/x"
