"""A library that tells torch how many GPUs a node has, by a variable. A rank that uses one waits forever."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

#: ``FAKE_GPUS_n1``, else ``FAKE_GPUS``: the number, or ``e802``, CUDA's error.
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cudaGetDeviceProperties(void *properties, int device) { for (;;) pause(); }
int cudaGetDeviceProperties_v2(void *properties, int device) { for (;;) pause(); }
int cudaGetDeviceCount(int *count) {
    char name[200];
    const char *node = getenv("SLURMD_NODENAME"), *value;
    snprintf(name, sizeof name, "FAKE_GPUS_%s", node ? node : "");
    if (!(value = getenv(name))) value = getenv("FAKE_GPUS");
    if (value && *value == 'e') return *count = 0, atoi(value + 1);
    *count = value ? atoi(value) : 0;
    return 0;
}
"""


def library(folder: Path) -> Path:
    """Build it for LD_PRELOAD; skip where there is no gcc."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source, built = folder / "lost_gpus.c", folder / "lost_gpus.so"
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    return built
