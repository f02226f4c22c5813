"""Count a detector's parameters, and its multiply-accumulates (MACs) for one image."""

import torch
from torch import nn

from vil.tasks.cost import CostRow, count_macs, msvit_cost, num_params


def detector_cost(model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
    """Return the parameters and MACs of each stage, of the feature pyramid, and of each head.

    size: (height, width) of the image in pixels. The model may be on the meta device. The MACs of
    the box and mask heads are for the maximum numbers of proposals and detections.
    """
    backbone = model.backbone
    rows = msvit_cost(backbone.body, size)[:-1]  # drop the row of the head
    sides = [backbone.divisor * -(-side // backbone.divisor) for side in size]
    channels, strides = backbone.body.channels, backbone.body.strides
    maps = [
        torch.empty(1, channels[i], *(side // strides[i] for side in sides), device="meta")
        for i in backbone.stages
    ]
    levels, macs = count_macs(backbone.fpn, maps, [None] * len(maps))
    width = backbone.out_channels
    params = num_params(backbone) - num_params(backbone.body)
    rows.append(CostRow("pyramid", "", f"{len(levels)} levels", width, params, macs))
    if hasattr(model, "head"):
        macs = count_macs(model.head, levels)[1]
        return [*rows, CostRow("head", "", "", width, num_params(model.head), macs)]
    roi, rpn = model.roi_heads, model.rpn
    rows.append(CostRow("rpn", "", "", width, num_params(rpn), count_macs(rpn.head, levels)[1]))
    heads = {"boxes": ("box", rpn.post_nms_top_n())}
    if roi.has_mask():
        heads["masks"] = ("mask", roi.detections_per_img)
    for name, (prefix, number) in heads.items():
        layers = getattr(roi, f"{prefix}_head"), getattr(roi, f"{prefix}_predictor")
        side = getattr(roi, f"{prefix}_roi_pool").output_size[0]
        pooled = torch.empty(number, width, side, side, device="meta")
        macs = count_macs(nn.Sequential(*layers), pooled)[1]
        params = sum(map(num_params, layers))
        rows.append(CostRow(name, "", f"{number} regions", "", params, macs))
    return rows
