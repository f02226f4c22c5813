"""Versions, devices, and which attention backend runs in each stage, and why the others do not.

vil info
vil info --config-file imagenet/vil_tiny.yaml DEVICE cpu
"""

import argparse
import platform

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from vil import build
    from vil.engine.run import PACKAGES, version
    from vil.ops import BACKENDS, explain
    from vil.ops.window import NEIGHBOURS

    cfg = resolve(args)
    device = build.set_up(cfg)
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("  ".join(f"{name} {version(name)}" for name in PACKAGES))
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device {device}, {torch.get_num_threads()} threads, CUDA: {', '.join(cards) or 'none'}")
    with torch.device("meta"):
        model = build.build_model(cfg, weights_follow=True)
    for number, attention, case in build.attention_cases(model, cfg, device):
        window = case.window
        if len(window.offsets) == 2 and window.offsets[1] != NEIGHBOURS[0]:
            continue  # one neighbour stands for all eight
        seen = {1: "the own chunk", 2: "the own chunk and one neighbour"}
        rows, cols = window.grid
        print(
            f"stage {number}: {rows} x {cols} tokens, w {window.size}, "
            f"{seen.get(len(window.offsets), 'all nine chunks')}"
        )
        for name, verdict in explain(case, attention.backend).items():
            print(f"  {name:16} {verdict:12} ({BACKENDS[name].about})")
    return 0
