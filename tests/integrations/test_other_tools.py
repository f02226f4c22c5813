"""Tracers and counters of other packages on our models, as docs/guides/export.md says.

tests/test_doc_blocks.py runs that page, which loads its files in a process without this package.
"""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vil
from vil.export.trace import use_backend
from vil.ops import Window, local_attention

pytestmark = pytest.mark.trust(10)
LINEAR = ("conv", "linear")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return vil.get_model("vil_nano", img_size=64).eval()


def test_jit_trace_gives_the_model_in_plain_operators(model):
    traced = torch.jit.trace(model, torch.zeros(2, 3, 64, 64))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(traced(images), model(images))
    assert "vil::" not in str(traced.inlined_graph)


def count_attention(inputs, outputs):
    from fvcore.nn.jit_handles import get_shape

    query, key = get_shape(inputs[0]), get_shape(inputs[1])
    return 2 * torch.Size(query).numel() * key[-2]


def test_fvcore_counts_what_torch_counts(model):
    """Its convolutions and linear layers; with a rule for fused attention, everything."""
    analysis = pytest.importorskip("fvcore.nn").FlopCountAnalysis
    images = torch.zeros(1, 3, 64, 64)
    with (
        torch.no_grad(),
        use_backend(model, "gathered"),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(images)
    by_torch = counter.get_flop_counts()["Global"]
    plain = analysis(model, images)
    counts = plain.by_operator()
    assert plain.unsupported_ops()["aten::scaled_dot_product_attention"] > 0
    attention = sum(n for op, n in by_torch.items() if "bmm" in str(op)) // 2
    assert 2 * sum(counts[op] for op in LINEAR) == sum(by_torch.values()) - 2 * attention
    plain.set_op_handle("aten::scaled_dot_product_attention", count_attention)
    assert plain.by_operator()["scaled_dot_product_attention"] == attention


@pytest.mark.long
def test_a_program_with_a_pinned_backend_needs_vil_ops_only(tmp_path):
    q, k, v = torch.randn(3, 1, 2, 48, 8)

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return local_attention(q, k, v, Window((6, 8), 3), backend="blocked")

    expected = Attend()(q, k, v)
    program = torch.export.export(Attend(), (q, k, v), strict=False)
    torch.export.save(program, tmp_path / "pinned.pt2")
    torch.save(((q, k, v), expected), tmp_path / "expected.pt")
    code = (
        "import sys, torch\nfrom vil.ops import local_attention\n"
        "inputs, expected = torch.load('expected.pt')\n"
        "out = torch.export.load('pinned.pt2').module()(*inputs)\n"
        "torch.testing.assert_close(out, expected)\n"
        "assert not {'vil.models', 'vil.layers', 'vil.config'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
