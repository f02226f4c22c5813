"""Regression tests of defects of the 2021 model and attentions. README.md lists all."""

import gc

import pytest
import torch
from torch import nn

import vil
from tests.common.built import task_of
from vil.config import get_config
from vil.data.batch import Batch
from vil.engine.build import MEMORY_FORMATS
from vil.ops import BACKENDS, Case, Window, local_attention
from vil.workflows.execution import execution_of
from vil.workflows.prepare import move_to_device

pytestmark = pytest.mark.smoke

CPU = torch.device("cpu")
ARCH = "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n1,s1,g1,p2,f3,a0"
SMALL = (f"MODEL.VIT.MSVIT.ARCH={ARCH}", "INPUT.IMAGE_SIZE=40", "DATA.NUM_CLASSES=5")
MSVIT = "MODEL.VIT.MSVIT"


def configured(*opts: str):
    return get_config(opts=[*SMALL, *opts])


def built(*opts: str) -> nn.Module:
    return vil.build_model(configured(*opts))


@pytest.mark.defect("B3")
def test_the_default_architecture_runs():
    """B3. The original's had 12 heads for a width of 796."""
    with torch.device("meta"):
        assert vil.build_model(get_config())(torch.empty(1, 3, 224, 224)).shape == (1, 1000)


@pytest.mark.defect("B4")
def test_channels_last_reaches_weights_and_images_and_changes_no_loss():
    """B4. One of the two was converted, and neither without AMP."""
    batch = Batch(torch.randn(4, 3, 40, 40), torch.arange(4), torch.arange(4))
    seen, losses = [], []
    for name in ("nchw", "nhwc"):
        cfg = configured(f"AMP.MEMORY_FORMAT={name}", "MODEL.VIT.DROP_PATH=0")
        model = move_to_device(vil.build_model(cfg), execution_of(cfg, CPU))
        patches = model.stages[0].embed.proj
        patches.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        task = task_of(cfg)
        losses.append(task.loss(model, task.prepare(batch)).value.item())
        tensors = (patches.weight, seen[-1])
        assert all(t.is_contiguous(memory_format=MEMORY_FORMATS[name]) for t in tensors)
        assert all(t.is_contiguous() == (name == "nchw") for t in tensors)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.defect("B6")
def test_ln_eps_reaches_every_norm():
    """B6. The original stored it and used 1e-6."""
    model = built(f"{MSVIT}.LN_EPS=0.5")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 1 + 2 + 2 * 2  # the last one, a patch norm and two in the block of each
    assert {norm.eps for norm in norms} == {0.5}


CYCLIC = [
    (name, Window(grid, 3, mask=-1))
    for grid in ((7, 8), (4, 10), (2, 2))
    for name, backend in BACKENDS.items()
    if not backend.unsupported(Case(Window(grid, 3, mask=-1), 1, 1, 4))
]


@pytest.mark.defect("B14")
@pytest.mark.parametrize(("name", "window"), CYCLIC, ids=str)
def test_cyclic_padding_is_never_seen(name, window):
    """B14. Values of 1 average to 1, unless the zeros of the padding are among them."""
    q = torch.ones(1, 1, window.length, 4)
    out = local_attention(q, -q, q, window, backend=name)  # scores of -2, a zero key would win
    torch.testing.assert_close(out, q)


@pytest.mark.defect("B16")
@pytest.mark.parametrize("amp", [False, True])
def test_the_backward_by_hand_follows_the_precision(amp):
    """B16. It was float16 on GPUs always, and failed without global tokens and AMP."""
    found = []
    for name in ("longformerhand", "longformerauto"):
        arch = ARCH.replace("g1", "g0")
        model = built(f"{MSVIT}.ATTN_TYPE={name}", f"{MSVIT}.ARCH={arch}").eval()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(torch.randn(2, 3, 40, 40))
        assert logits.dtype == (torch.bfloat16 if amp else torch.float32)
        logits.float().square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad.dtype == torch.float32 for grad in grads)
        found.append(torch.cat([grad.flatten() for grad in grads]))
    tolerance = 2e-2 if amp else 1e-5
    assert (found[0] - found[1]).norm() <= tolerance * found[1].norm()


@pytest.mark.defect("B31")
@torch.no_grad()
def test_new_image_sizes_do_not_keep_memory():
    """B31. Masks of 128 sizes were cached, on the GPU too."""
    model, alive = built().eval(), []
    for sizes in ([(40, 40)], [(44, 52), (65, 70), (48, 120)]):
        for size in sizes:
            model(torch.randn(1, 3, *size))
        gc.collect()
        alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    assert alive[0] == alive[1]
