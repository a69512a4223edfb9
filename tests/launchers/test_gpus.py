"""GPUs are counted without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli.parallel_runs import slot_environment
from hpc_train.rank import env
from hpc_train.rank.env import count_gpus
from tests.launchers.fake_ranks import launch, new_request
from tests.programs import put_program


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0", 1), ("2, 3", 2), ("0,-1,1", 1), ("GPU-8f2e,MIG-a/1/0", 2)],
)
def test_the_variable_counts_as_cuda_reads_it(visible: str, count: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_else_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, "nvidia-smi", "print('GPU 0: A\\n  MIG 1g: (UUID: x)\\nGPU 1: A')", monkeypatch)
    assert count_gpus({}) == 2


LISTED = """GPU 0: A (UUID: GPU-1)
  MIG 3g.20gb Device 0: (UUID: MIG-a)
  MIG 3g.20gb Device 1: (UUID: MIG-b)
GPU 1: A (UUID: GPU-2)
"""


@pytest.mark.fault(52)
def test_mig_devices_are_named_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees one of them at most, so ranks and runs must each be given their own."""
    put_program(tmp_path, "nvidia-smi", f"print({LISTED!r})", monkeypatch)
    names = ["MIG-a", "MIG-b", "GPU-2"]
    assert (env.gpu_names({}), count_gpus({})) == (names, 3)
    assert env.mig_variables({}) == {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,GPU-2"}
    assert env.mig_variables({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slot_environment({}, slot, 3, 1, "auto")["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == names


@pytest.mark.fault(52)
def test_local_ranks_are_told_all_mig_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, "nvidia-smi", f"print({LISTED!r})", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    request = new_request(tmp_path, devices=2, device="auto")
    launch(request, "(run.folder / f'sees-{rank}').write_text(os.environ['CUDA_VISIBLE_DEVICES'])")
    seen = [(request.paths.folder / f"sees-{rank}").read_text() for rank in range(2)]
    assert seen == ["MIG-a,MIG-b,GPU-2"] * 2


@pytest.mark.parametrize("script", ["raise SystemExit(9)", None])
def test_fallback_is_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        put_program(tmp_path, "nvidia-smi", script, monkeypatch)
    monkeypatch.setattr(env, "_DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert count_gpus({}) == 2
