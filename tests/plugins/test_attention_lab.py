"""The pattern and the attention of docs/tutorials/attention_lab.md, from files outside of the
package: each trains, is exported, and patched into a timm model."""

import pytest

from tests.common.doc_pages import PythonBlocks, blocks
from tests.common.small_runs import TINY

PAGE = "docs/tutorials/attention_lab.md"
MSVIT = "MODEL.VIT.MSVIT"
COMMAND = """
from vil.cli import main
code = main({words!r})
assert code == 0, code
"""
PATCH = """
import copy, timm, torch, vil
from vil.export.exporter import export_model

model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=2)
plain = copy.deepcopy(model).eval()
vil.patch_attention(model, {name!r}, **{options!r})
model(torch.randn(2, 3, 64, 64)).sum().backward()
assert all(p.grad is not None for n, p in model.named_parameters() if "blocks.0.mlp" in n)
copy.deepcopy(model)
export_model(model, {name!r} + ".onnx", size=(64, 64), dynamic=["batch"])
vil.patch_attention(model, "full")
images = torch.randn(1, 3, 64, 64)
assert torch.equal(model.eval()(images), plain(images))
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def forks():
    started = PythonBlocks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the page asks to save."""
    folder = tmp_path_factory.mktemp("lab")
    for name, part in (("diagonals", 'register_pattern("'), ("row_means", 'register_attention("')):
        block = next(b for b in blocks(PAGE) if b.language == "python" and part in b.code)
        (folder / f"{name}.py").write_text(block.code)
    return folder


def run(forks, folder, *words):
    answer = forks.run([(" ".join(words), COMMAND.format(words=list(words)))], folder)
    assert answer == "done", answer


SETTINGS = {
    "diagonals": (f"{MSVIT}.ATTN_TYPE=pattern", f"{MSVIT}.PATTERN=diagonals:1 | local:1"),
    "row_means": (f"{MSVIT}.ATTN_TYPE=row_means",),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_and_is_exported(name, forks, folder):
    own = (*TINY, *SETTINGS[name], "--import", f"{name}.py")
    run(forks, folder, "train", *own, "--output_dir", name)
    run(forks, folder, "evaluate", "--run", name, "--import", f"{name}.py")
    run(forks, folder, "export", "--run", name, "--import", f"{name}.py", "--out", f"{name}.onnx")
    assert (folder / f"{name}.onnx").stat().st_size > 1000


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_patched_into_a_timm_model(name, forks, folder):
    code = (folder / f"{name}.py").read_text()
    pattern = ("pattern", {"pattern": "diagonals:1"})
    attention, options = (name, {}) if name == "row_means" else pattern
    patch = PATCH.format(name=attention, options=options)
    answer = forks.run([(name, code), ("patch", patch)], folder)
    assert answer == "done", answer
