"""Freed memory of tensors is kept by the C library, unless the user has configured it."""

import subprocess
import sys

import pytest

from vil.utils.allocator import VARIABLES, keep_freed_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
CODE = """
import resource, torch
from vil.utils.allocator import keep_freed_memory
keep_freed_memory() if {kept} else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [torch.ones(2**20) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@linux
@pytest.mark.parametrize("name", VARIABLES)
def test_settings_of_the_user_are_kept(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


@linux
def test_freed_tensors_cause_no_page_faults():
    """A page of a new 4 MiB tensor is a page fault, unless its memory was used before."""

    def count(kept):
        run = [sys.executable, "-c", CODE.format(kept=kept)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    assert count(True) < 1000 < count(False)
