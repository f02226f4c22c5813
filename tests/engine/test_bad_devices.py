"""GPUs that are missing, cannot start, are too old or too small: one line each."""

import pytest
import torch

import vil.cli.info
from vil.cli import main
from vil.config import get_config
from vil.engine.build import configure_device
from vil.errors import ConfigError
from vil.ops import Case, Window, choose
from vil.ops.backends.triton import fused


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 79 << 30)
    return monkeypatch


def configure(*options: str) -> None:
    configure_device(get_config(None, options))


def test_a_gpu_that_does_not_exist_is_named(gpu):
    with pytest.raises(ConfigError, match=r"DEVICE cuda:7 was not found \(1 CUDA devices\)"):
        configure("DEVICE=cuda:7")


def test_a_driver_that_fails_is_one_line(gpu):
    def fail(*shape, device):
        raise RuntimeError("CUDA driver initialization failed\nCompile with TORCH_USE_CUDA_DSA")

    gpu.setattr(torch, "zeros", fail)
    with pytest.raises(ConfigError, match="DEVICE cuda cannot be used: CUDA driver .* failed;"):
        configure("DEVICE=cuda")


def test_a_gpu_without_bfloat16_names_float16(gpu):
    gpu.setattr(torch, "zeros", lambda *shape, device: None)
    gpu.setattr(torch.cuda, "is_bf16_supported", lambda **options: False)
    gpu.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match="Tesla T4 does not support AMP.DTYPE bfloat16"):
        configure("DEVICE=cuda", "AMP.ENABLED=True", "AMP.DTYPE=bfloat16")


def test_a_gpu_too_old_for_the_kernels_uses_others(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    gpu.delenv("TRITON_INTERPRET", raising=False)
    case = Case(Window((28, 28), 7), 2, 3, 32, 1, torch.float16, "cuda")
    assert fused.unsupported(case) == ["it needs a GPU of compute capability 8.0 or newer"]
    assert choose(case) != "triton"
    with pytest.raises(ValueError, match="'triton' cannot run .* capability 8.0 or newer"):
        choose(case, "triton")


def test_a_gpu_without_memory_left_says_what_to_change(gpu, capsys):
    def run(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    gpu.setattr(vil.cli.info, "run", run)
    assert main(["info"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "peak 79.0 of 80.0 GiB" in line
    for key in ("DATALOADER.BSZ", "OPTIM.ACCUMULATE", "MODEL.GRAD_CHECKPOINT"):
        assert key in line
