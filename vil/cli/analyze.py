"""Parameters and multiply-accumulates of each stage, for one image; or where layouts change.

vil analyze --config-file imagenet/vil_small.yaml
vil analyze --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384
vil analyze --config-file coco/mask_rcnn_vil_tiny_1x.yaml INPUT.IMAGE_SIZE 800
vil analyze --config-file imagenet/vil_small.yaml --layout AMP.MEMORY_FORMAT nhwc

--layout runs one training step in the config's precision and memory format, and lists every copy
that brings a tensor's numbers into another order in memory: module, direction, bytes, and share of
the time of all operators. What an attention backend does inside is not looked into.
"""

import argparse

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    add("--layout", action="store_true", help="list the copies that change a tensor's layout")
    add("--batch", type=int, default=4, metavar="B", help="images, for --layout (4)")


def run(args: argparse.Namespace) -> int:
    import torch

    from vil import build
    from vil.models.vision_longformer import MsViT
    from vil.tasks.detection.models.detectors import PerImageDetector

    cfg = resolve(args)
    if args.layout:
        return layout(of_classifier(cfg, "--layout looks at classifiers"), args.batch)
    with torch.device("meta"):
        model = build.build_model(cfg, weights_follow=True)
    size = (cfg.INPUT.IMAGE_SIZE,) * 2
    kinds = {MsViT: ours, PerImageDetector: detector}
    look = next((look for kind, look in kinds.items() if isinstance(model, kind)), foreign)
    rows, counts = look(model, size)
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for (name, what, tokens, width, parameters), count in zip(rows, counts):
        print(f"{name:8} {what:16} {tokens:>14} {width:>6} {parameters:>12,} {count:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {_count(model):>12,} {sum(counts):>15,}")
    return 0


def layout(cfg: CfgNode, batch: int) -> int:
    """The conversions of one training step on noise."""
    import torch

    from vil import build
    from vil.bench.layout_copies import conversions
    from vil.layers.attention import set_progress
    from vil.utils.train_step import TrainStep

    if batch < 1:
        raise ConfigError(f"--batch must be at least 1, got {batch}")
    device = build.set_up(cfg)
    model = build.place(build.build_model(cfg, weights_follow=True), cfg, device).train()
    set_progress(model, TrainStep(cfg.SEED, 0, 0, 1, 1))
    images = torch.randn(batch, 3, cfg.INPUT.IMAGE_SIZE, cfg.INPUT.IMAGE_SIZE, device=device)
    images = images.contiguous(memory_format=build.MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT])
    found = conversions(model, images, build.amp_dtype(cfg))
    print(f"{'module':40} {'way':9} {'operator':9} {'calls':>6} {'MiB':>9} {'of time':>8}")
    for row in found:
        print(_line(row.module, row.way, row.operator, row.calls, row.bytes, row.share))
    calls, size, share = (sum(row[i] for row in found) for i in (3, 4, 5))
    print(_line("all", "", "", calls, size, share))
    return 0


def _line(module: str, way: str, operator: str, calls: int, size: int, share: float) -> str:
    return f"{module:40} {way:9} {operator:9} {calls:6} {size / 2**20:9.2f} {share:8.2%}"


def ours(model, size: tuple[int, int]) -> tuple[list[tuple], list[int]]:
    """A row (name, attention, tokens, width, parameters) per stage and the head, and their MACs."""
    rows = []
    stages = zip(model.stages, model.specs, model.grids(size))
    for number, (stage, spec, grid) in enumerate(stages, start=1):
        what = f"{len(spec.attention)} x {','.join(dict.fromkeys(spec.attention)) or '-'}"
        tokens = f"{grid[0]} x {grid[1]} + {spec.num_global}"
        rows.append((f"stage {number}", what, tokens, spec.dim, _count(stage)))
    rows.append(("head", "", "", model.num_features, _count(model.norm) + _count(model.head)))
    return rows, model.macs(size)


def detector(model, size: tuple[int, int]) -> tuple[list[tuple], list[int]]:
    """The stages, the pyramid, and the heads on all they may be asked for: the proposals of
    evaluation, and masks for as many objects as an image may have."""
    import torch

    backbone = model.backbone
    rows, counts = ours(backbone.body, size)
    sides = [backbone.divisor * -(-side // backbone.divisor) for side in size]
    maps = [
        torch.empty(1, width, *(side // stride for side in sides), device="meta")
        for width, stride in zip(backbone.body.channels, backbone.body.strides)
    ]
    maps = [maps[i] for i in backbone.stages]
    levels, macs = counted(backbone.fpn, maps, [None] * len(maps))
    width = backbone.out_channels
    rows, counts = rows[:-1], counts[:-1]  # a body has no head
    rows.append(
        ("pyramid", "", f"{len(levels)} levels", width, _count(backbone) - _count(backbone.body))
    )
    counts.append(macs)
    if hasattr(model, "head"):
        rows.append(("head", "", "", width, _count(model.head)))
        return rows, [*counts, counted(model.head, levels)[1]]
    roi, rpn = model.roi_heads, model.rpn
    rows.append(("rpn", "", "", width, _count(rpn)))
    counts.append(counted(rpn.head, levels)[1])
    heads = {"boxes": ("box", rpn.post_nms_top_n())}
    if roi.has_mask():
        heads["masks"] = ("mask", roi.detections_per_img)
    for name, (kind, number) in heads.items():
        head, last = getattr(roi, f"{kind}_head"), getattr(roi, f"{kind}_predictor")
        side = getattr(roi, f"{kind}_roi_pool").output_size[0]
        pooled = torch.empty(number, width, side, side, device="meta")
        hidden, macs = counted(head, pooled)
        rows.append((name, "", f"{number} regions", "", _count(head) + _count(last)))
        counts.append(macs + counted(last, hidden)[1])
    return rows, counts


def counted(module, *arguments):
    """What a module makes of tensors on the meta device, and its MACs."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = module.eval()(*arguments)
    return found, counter.get_total_flops() // 2


def foreign(model, size: tuple[int, int]) -> tuple[list[tuple], list[int]]:
    """One row for all of a model that is none of ours, its MACs half of torch's counted FLOPs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.empty(1, 3, *size, device="meta"))
    return [("model", "", "", "", _count(model))], [counter.get_total_flops() // 2]


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
