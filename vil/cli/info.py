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
    from vil.engine.run_dir import PACKAGES, version
    from vil.ops import BACKENDS, explain
    from vil.ops.dispatch import CHOICES
    from vil.ops.tuning import tuning_cache

    cfg = resolve(args)
    device = build.set_up(cfg)
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("  ".join(f"{name} {version(name)}" for name in PACKAGES))
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device {device}, {torch.get_num_threads()} threads, CUDA: {', '.join(cards) or 'none'}")
    with torch.device("meta"):
        model = build.build_model(cfg, weights_follow=True)
    tuning_cache.load(device.type)
    asked = build.attention_cases(model, cfg, device)
    for one in asked:
        print(one)
        for name, verdict in explain(one.case, one.backend).items():
            print(f"  {name:16} {verdict:14} ({BACKENDS[name].about})")
    known = sum(one.case.bucket() in CHOICES for one in asked)
    if asked:
        print(f"{known} of {len(asked)} tuned, in {tuning_cache.path()}")
    return 0
