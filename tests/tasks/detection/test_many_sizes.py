"""Pictures of ever other sizes cost nothing but their own time."""

from copy import deepcopy

import pytest
import torch

import vil
from tests.common.detection.detectors import detector, pictures
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.layers.attention.longformer import LongformerAttention
from vil.workflows.attention_backend import (
    backend_requests,
    select_attention_backends,
)
from vil.workflows.execution import execution_of

SIZES = ((64, 96), (131, 70), (90, 120), (128, 128), (100, 60))
SMALL = (
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n1,s1,g1,p4,f4,a0_l2,h1,d16,n1,s1,g1,p2,f3,a0",
    "DETECTION.MODEL=faster_rcnn", "DETECTION.FPN.STAGES=[1,2]", "DETECTION.FPN.CHANNELS=16",
    "DETECTION.ANCHORS.SIZES=[16,32,64]", "DATA.NUM_CLASSES=3", "INPUT.IMAGE_SIZE=64",
    "DETECTION.BOX.CHANNELS=16", "DEVICE=cpu",
)  # fmt: skip


def backends(model: torch.nn.Module) -> list[str]:
    return [m.backend for m in model.modules() if isinstance(m, LongformerAttention)]


@pytest.mark.parametrize("training", [True, False])
def test_one_backend_for_all_sizes(training, without_native):
    """That of small maps, which has a limit, is not taken although the usual size is small."""
    cfg = get_config(None, SMALL)
    model = vil.build_model(cfg)
    execution = execution_of(cfg, torch.device("cpu"))
    asked = backend_requests(model, execution, training=training)
    assert all(a.case.valid for a in asked)
    copy = deepcopy(model)
    select_attention_backends(model, execution, DistInfo(), training=training, copies=[copy])
    assert set(backends(model)) == set(backends(copy)) == {"blocked"}


@pytest.mark.slow
def test_one_compiled_program_for_all_sizes():
    from torch._dynamo.utils import counters

    model = detector().eval()
    for attention in model.modules():
        if isinstance(attention, LongformerAttention):
            attention.backend = "blocked"
    with torch.no_grad():
        plain = [model(pictures(size))[0] for size in SIZES]
        counters.clear()
        model.backbone.compile(dynamic=True)
        for size, expected in zip(SIZES, plain):
            (found,) = model(pictures(size))
            assert torch.allclose(found["boxes"], expected["boxes"], atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
