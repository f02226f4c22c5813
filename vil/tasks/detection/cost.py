"""Parameters and multiply-accumulates of a detector's parts, for one image."""

import torch
from torch import nn

from vil.builders.cost import CostRow, count_macs, msvit_cost, num_params


def detector_cost(model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
    """The stages, the feature pyramid, and the heads on all they may be asked for: the proposals of
    evaluation, and masks for as many objects as an image may have."""
    backbone = model.backbone
    rows = msvit_cost(backbone.body, size)[:-1]  # a body has no head
    sides = [backbone.divisor * -(-side // backbone.divisor) for side in size]
    maps = [
        torch.empty(1, width, *(side // stride for side in sides), device="meta")
        for width, stride in zip(backbone.body.channels, backbone.body.strides)
    ]
    maps = [maps[i] for i in backbone.stages]
    levels, macs = count_macs(backbone.fpn, maps, [None] * len(maps))
    width = backbone.out_channels
    pyramid = num_params(backbone) - num_params(backbone.body)
    rows.append(CostRow("pyramid", "", f"{len(levels)} levels", width, pyramid, macs))
    if hasattr(model, "head"):
        macs = count_macs(model.head, levels)[1]
        return [*rows, CostRow("head", "", "", width, num_params(model.head), macs)]
    roi, rpn = model.roi_heads, model.rpn
    rows.append(CostRow("rpn", "", "", width, num_params(rpn), count_macs(rpn.head, levels)[1]))
    heads = {"boxes": ("box", rpn.post_nms_top_n())}
    if roi.has_mask():
        heads["masks"] = ("mask", roi.detections_per_img)
    for name, (kind, number) in heads.items():
        head, last = getattr(roi, f"{kind}_head"), getattr(roi, f"{kind}_predictor")
        side = getattr(roi, f"{kind}_roi_pool").output_size[0]
        pooled = torch.empty(number, width, side, side, device="meta")
        hidden, macs = count_macs(head, pooled)
        macs += count_macs(last, hidden)[1]
        parameters = num_params(head) + num_params(last)
        rows.append(CostRow(name, "", f"{number} regions", "", parameters, macs))
    return rows
