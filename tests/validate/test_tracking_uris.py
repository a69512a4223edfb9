"""``logging.mlflow.tracking_uri``: stores that MLflow has, and no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import GOOD, problems_of

KEY = "logging.mlflow.tracking_uri"


@pytest.mark.parametrize(
    "uri",
    [
        "https://mlflow.example.org:5000/path",
        "http://127.0.0.1:5000",
        "databricks",
        "databricks://profile",
        "file:///scratch/mlruns",
        "file:/scratch/mlruns",
        "/scratch/mlruns",
        "sqlite:////scratch/mlflow.db",
        "postgresql+psycopg2://me@db.example.org/mlflow",
    ],
)
def test_stores_of_mlflow_are_accepted(uri: str, tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD, f"{KEY}={uri}") == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("https://me:hunter2@x.org", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("https://hunter2@x.org", "contains a user or a secret, and each run folder has a copy"),
        ("https://x.org/?access_token=hunter2", "contains a user or a secret"),
        ("postgresql://me:hunter2@db/mlflow", "take out the key, and set MLFLOW_TRACKING_URI"),
        ("postgresql://db/mlflow?password=hunter2", "contains a user or a secret"),
        ("'https://[x.org'", "is not a URI"),
        ("'https://x.org/a b'", "has a blank"),
        ("ftp://x.org", "MLflow has no store for 'ftp:'; write a URI of http, https"),
        ("mlruns", "is a relative path; write an absolute one, file:///folder/mlruns"),
        ("file://scratch/mlruns", "is a relative path; write an absolute one, file:///folder/mlruns"),
        ("sqlite:///mlflow.db", "is a relative path; write an absolute one, sqlite:////folder/mlflow.db"),
    ],
)
def test_what_is_wrong_is_named_without_the_secret(uri: str, said: str, tmp_path: Path) -> None:
    (line,) = problems_of(tmp_path, GOOD, f"{KEY}={uri}")
    assert KEY in line and said in line and "hunter2" not in line
