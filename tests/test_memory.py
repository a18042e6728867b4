from __future__ import annotations

import subprocess
import sys

import pytest

from jdfl_lightning.core.system import reuse_memory

CODE = """
import resource, torch
from jdfl_lightning.core.system import reuse_memory

def faults():
    for _ in range(16):  # the heap needs some to settle: eight, as seen
        torch.ones(16_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
reuse_memory()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_of_large_tensors_is_reused() -> None:
    """10 tensors of 64 MB, 4 kB a page: 156,250 pages that come anew, or none."""
    if not reuse_memory():
        pytest.skip("another C library")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    left, reused = map(int, done.stdout.split())
    assert reused < left / 20
