"""Versions, devices, and which attention backend runs in each stage, and why the others do not.

vil info
vil info --config-file imagenet/vil_tiny.yaml DEVICE cpu
"""

import argparse
import platform
from importlib import metadata

from vil.cli.arguments import config_arguments, resolve

PACKAGES = ("vil", "torch", "torchvision", "timm", "yacs", "numpy", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from vil import build
    from vil.ops import BACKENDS, explain

    cfg = resolve(args)
    device = build.set_up(cfg)
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("  ".join(f"{name} {_version(name)}" for name in PACKAGES))
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device {device}, {torch.get_num_threads()} threads, CUDA: {', '.join(cards) or 'none'}")
    with torch.device("meta"):
        model = build.build_model(cfg)
    for number, grid, attention, case in build.attention_cases(model, cfg, device):
        print(
            f"stage {number}: {grid[0]} x {grid[1]} tokens, longformer, w {attention.window_size}"
        )
        for name, verdict in explain(case, attention.backend).items():
            print(f"  {name:16} {verdict:12} ({BACKENDS[name].about})")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
