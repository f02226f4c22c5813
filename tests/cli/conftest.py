"""Commands set torch's global switches and read the environment; here neither leaks."""

import pytest
import torch

from tests.common.small_runs import OF_THE_ORIGINAL, OF_TORCHRUN


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No torchrun around the test, and an empty working directory."""
    for name in (*OF_TORCHRUN, *OF_THE_ORIGINAL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def _global_switches():
    """One thread: tensors this small gain nothing from two, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
