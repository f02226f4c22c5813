"""Freed memory of tensors is kept by the C library, unless the user has configured it."""

import subprocess
import sys

import pytest

from vil.utils.allocator import VARIABLES, keep_freed_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
CODE = """
import resource, torch
from vil.utils.allocator import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [torch.ones(30 * 2**18) for _ in range(4)]  # 30 MiB each: more than glibc keeps
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


@pytest.mark.long
@linux
def test_freed_tensors_cause_no_page_faults():
    """A new page of memory is a page fault. Without the settings there are usually many."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 1000
