"""Whether malloc keeps what is freed, seen by the pages that the kernel has to map again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from hpc_train.training.distributed.rank_limits import keep_freed

glibc_only = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
SCRIPT = r"""
import os, re, resource, sys
from hpc_train.training.distributed.rank_limits import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 20_000_000, b"x" * 100_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1:] == ["keep"]:
    assert keep_freed({})
first, second, third = faults(), faults(), faults()

def size_kb():
    return int(re.search(r"VmData:\s+(\d+)", open("/proc/self/status").read())[1])

before, large = size_kb(), bytes(300 << 20)
del large
print(first > 20_000, third > 20_000, third < 200, size_kb() - before < 1024)
"""


def printed(*arguments: str) -> str:
    """Return what the script prints, in a process whose memory no test has used."""
    return subprocess.check_output([sys.executable, "-c", SCRIPT, *arguments], text=True)


@glibc_only
def test_pages_are_mapped_once_but_for_very_large_blocks() -> None:
    """Else a rank whose memory is just enough for such a block can fail at the next one."""
    assert (printed(), printed("keep")) == ("True True False True\n", "True False True True\n")


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_a_setting_of_the_user_stays(name: str) -> None:
    assert not keep_freed({name: "1000000"})
    assert not keep_freed({"GLIBC_TUNABLES": "glibc.cpu.x=1:glibc.malloc.trim_threshold=1000000"})


@pytest.mark.parametrize(("limit_mib", "is_refused"), [(500, True), (4000, False)])
def test_an_address_space_without_room_for_training_is_refused(limit_mib: int, is_refused: bool) -> None:
    module = "hpc_train.training.distributed.rank_limits"
    program = f"from {module} import check_address_space; check_address_space('n1')"
    done = subprocess.run(
        ["prlimit", f"--as={limit_mib << 20}", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    words = "EnvironmentRefusesError: ulimit -v: the address space of ranks on node n1 is limited to 500 MiB"
    assert (words in done.stderr) == is_refused
    assert (done.returncode != 0) == is_refused, done.stderr
