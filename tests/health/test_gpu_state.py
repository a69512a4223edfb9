"""The driver's counters of a GPU, as a nvidia-smi that is none tells them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_train.errors import HpcTrainError
from hpc_train.training.health import node_check
from hpc_train.training.health.node_check import GpuState, read_state, xid_lines
from tests.programs import answering, put_program

UP, DOWN = "Link 0: 26.562 GB/s", "Link 1: <inactive>"
SOUND = {"query-gpu": "0, Not Active", "query-remapped-rows": "0, 0", "nvlink": UP}
XID = "[7.1] NVRM: Xid (PCI:0000:41:00): 79, pid=7, GPU has fallen off the bus."
CUDA = torch.device("cuda", 0)
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Let nvidia-smi answer for a sound GPU, except as told."""
    properties = SimpleNamespace(uuid="8f", pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def put(**answers: str) -> None:
        answers = {key.replace("_", "-"): answer for key, answer in answers.items()}
        put_program(tmp_path, "nvidia-smi", answering(SOUND | answers), monkeypatch)

    return put


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({}, GpuState(links_up=1)),
        ({"query_gpu": "[N/A], [N/A]", "query_remapped_rows": "[N/A], [N/A]", "nvlink": ""}, GpuState()),
        ({"query_gpu": "3, Active"}, GpuState(ecc_errors=3, is_slowed=True, links_up=1)),
        ({"query_remapped_rows": "1, 0"}, GpuState(remap_pending=True, links_up=1)),
        ({"query_remapped_rows": "No, Yes"}, GpuState(remap_failed=True, links_up=1)),
        ({"nvlink": f"GPU 0: A\\n  {UP}\\n  {DOWN}"}, GpuState(links_up=1, links_down=1)),
    ],
)
def test_nvidia_smi_is_read(smi: Smi, answers: dict[str, str], state: GpuState) -> None:
    smi(**{key: answer.replace("\\n", "\n") for key, answer in answers.items()})
    assert read_state("GPU-8f") == state


def test_a_driver_that_tells_nothing_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_state("GPU-8f") == GpuState()
    put_program(tmp_path, "nvidia-smi", "raise SystemExit(9)", monkeypatch)
    assert read_state("GPU-8f") == GpuState()


@pytest.mark.fault(14)
@pytest.mark.parametrize(("rows", "words"), [("1, 0", "waits for a reset"), ("0, 1", "must be repaired")])
def test_memory_to_be_reset_excludes_the_node(smi: Smi, rows: str, words: str) -> None:
    smi(query_remapped_rows=rows)
    with pytest.raises(HpcTrainError, match=words):
        node_check._check_gpu(CUDA)


@pytest.mark.fault(14)
def test_what_may_be_momentary_only_warns(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    smi(query_gpu="3, Active", nvlink=f"{UP}\n{DOWN}")
    put_program(tmp_path, "dmesg", f"print({XID!r})\nprint({XID.replace(':41:', ':42:')!r})", monkeypatch)
    with caplog.at_level(logging.WARNING):
        node_check._check_gpu(CUDA)
    assert [message.removeprefix("cuda:0: ") for message in caplog.messages] == [
        "3 uncorrectable ECC errors since its driver was loaded",
        "its hardware slows its clocks down: temperature or power",
        "1 of its 2 NVLinks are inactive",
        XID,
    ]


def test_an_unreadable_kernel_log_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, "dmesg", f"print({XID!r}); raise SystemExit(1)", monkeypatch)
    assert xid_lines("0000:41:00") == []
