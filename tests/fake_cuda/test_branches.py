"""Each place that depends on CUDA has a test without a GPU, and the GPU tests run on the stand-in."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from tests import fake_cuda
from tests.fake_cuda.branches import LIST, ROOT, executed, places
from tests.fake_cuda.test_fake_cuda import with_stand_in

_RUNS_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"
_LISTED: dict[str, str | None] = json.loads(LIST.read_text(encoding="utf-8"))
_TESTS = sorted({test for test in _LISTED.values() if test is not None})
#: Of the GPU tests, those that take a second each.
_QUICK = "pinned or batch_reaches or looked_at or (nowhere and ddp) or float8_products"


def test_the_list_of_places_is_current() -> None:
    found = {place.key for place in places()}
    assert found == _LISTED.keys(), "run python -m tests.fake_cuda.branches with the tests of new places"


def test_nearly_all_places_have_a_test_and_the_docs_list_the_others() -> None:
    missing = [key for key, test in _LISTED.items() if test is None]
    assert len(missing) <= 0.05 * len(_LISTED)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for key in missing:
        file, function, _ = key.split("::")
        assert f"`{file}`, `{function}`" in page


def test_the_named_tests_exist() -> None:
    for test in _TESTS:
        file, name = test.partition("[")[0].split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), test


@pytest.mark.soak
@with_stand_in
def test_the_named_tests_execute_their_places() -> None:
    assert {key for key, test in _LISTED.items() if test} <= executed(_TESTS).keys()


@with_stand_in
def test_gpu_tests_pass_on_the_stand_in() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    chosen = [] if _RUNS_ALL else ["-k", _QUICK]
    done = subprocess.run(
        [*command, *chosen],
        cwd=ROOT,
        env=os.environ | fake_cuda.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
