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
    from vil.layers.attention.longformer import LongformerAttention

    cfg = resolve(args)
    device = build.set_up(cfg)
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("  ".join(f"{name} {_version(name)}" for name in PACKAGES))
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device {device}  cpu threads {torch.get_num_threads()}  cuda devices {', '.join(cards) or 'none'}")
    with torch.device("meta"):
        model = build.build_model(cfg)
    dtype = build.AMP_DTYPES[cfg.AMP.DTYPE] if cfg.AMP.ENABLED else torch.float32
    side = cfg.INPUT.IMAGE_SIZE
    for number, stage in enumerate(model.stages, start=1):
        side //= stage.embed.patch
        kinds = {type(block.attn).__name__: block.attn for block in stage.blocks}
        for kind, attn in kinds.items():
            print(f"stage {number}: {len(stage.blocks)} blocks, {side} x {side} tokens, {kind}")
            if isinstance(attn, LongformerAttention):
                _backends(attn, (side, side), cfg.DATALOADER.BSZ, dtype, device.type)
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backends(attn, grid: tuple[int, int], batch: int, dtype, device: str) -> None:
    """One line per backend: chosen, could run, or why not."""
    from vil.ops import BACKENDS, explain

    listing = explain(attn.case(grid, batch, dtype, device), attn.backend)
    for name, verdict in listing.items():
        print(f"  {name:16} {verdict:12} ({BACKENDS[name].about})")
