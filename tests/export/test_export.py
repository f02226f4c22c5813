"""Exported files give the model's logits at any dynamic size; unsupported settings raise."""

import json
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import vil
from vil.export import export_model, load_exported, quantize_linears
from vil.export.onnx import FIRST_OPSET
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.utils.errors import CheckpointError, ExportError

ROOT = Path(__file__).parents[2]
MODELS = {  # every attention, and both kinds of position: ARCH, attention
    "relative": (
        "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n2,s1,g2,p2,f2,a0_l3,h2,d16,n1,s0,g1,p2,a0",
        "longformer/global,pattern",
    ),
    "absolute": (
        "l1,h2,d8,n2,s1,g1,p4,f3,a1_l2,h2,d16,n2,s1,g0,p2,f5,a1",
        "longformer,srformer/linformer,performer",
    ),
}
SIZES = ((1, 64, 64), (4, 37, 90), (3, 96, 129))  # of images, other than those compared on writing
FILES = {"onnx": "m.onnx", "torch": "m.pt2"}


def perturb(model: nn.Module, noise: float = 0.3) -> nn.Module:
    """Enlarge weights, so that every part affects the logits; fresh ones hardly do."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (noise if parameter.ndim > 1 else 0.1))
    return model.eval()


def small(kind: str, **kwargs) -> MsViT:
    model = MsViT(parse_arch(*MODELS[kind]), img_size=64, num_classes=5, **kwargs)
    # the other masks; the example in the docs and the test of the command have SW_EXACT 0
    model.stages[0].blocks[0].attn.sw_exact = {"relative": -1, "absolute": 1}[kind]
    return perturb(model)


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.long) for kind in MODELS]
)
def model(request):
    return small(request.param)


@pytest.fixture(scope="module")
def absolute():
    return small("absolute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def written(model, folder):
    """The model's ONNX file with dynamic sizes, and its differences from the model."""
    path = folder / f"{model.specs[0].absolute}.onnx"
    return path, export_model(model, path, size=(64, 64), metadata={"classes": '["a", "b"]'})


def difference(file: nn.Module, model: nn.Module, shape: tuple[int, int, int]) -> float:
    images = torch.randn(shape[0], 3, *shape[1:])
    with torch.no_grad():
        return (file(images) - model(images)).abs().max().item()


# Files


def test_onnx_at_other_sizes_and_batches(model, written):
    path, differences = written
    assert {found.shape[0] for found in differences} == {1, 2, 3}
    assert len({found.shape[2:] for found in differences}) == 3
    assert max(found.largest for found in differences) < 1e-4
    file = load_exported(path)
    least = (2, 16, 16) if not model.specs[0].absolute else (2, 8, 9)  # one token in the last stage
    for size in (*SIZES, least):
        assert difference(file, model, size) < 1e-4, size


@pytest.mark.defect("B16")
def test_torch_programs_of_every_attention(model, folder):
    export_model(model, folder / "m.pt2", size=(64, 48))
    for size in SIZES:
        assert difference(load_exported(folder / "m.pt2"), model, size) < 1e-4, size


def test_axes_and_metadata_of_onnx_files(model, written):
    proto = onnx.load(written[0])
    names = [axis.dim_param or axis.dim_value for axis in shape(proto.graph.input)]
    assert names == ["batch", 3, "height", "width"]
    assert [axis.dim_param or axis.dim_value for axis in shape(proto.graph.output)] == ["batch", 5]
    metadata = load_exported(written[0]).metadata
    assert metadata["vil_version"] == vil.__version__
    assert parse_arch(metadata["arch"], metadata["attention"]) == list(model.specs)
    assert (metadata["input_size"], metadata["dynamic"]) == ("64x64", "batch,size")
    assert json.loads(metadata["classes"]) == ["a", "b"]
    assert str(ROOT) not in written[0].read_bytes().decode("latin-1")  # no local paths


def shape(values):
    assert len(values) == 1
    return values[0].type.tensor_type.shape.dim


def test_linears_in_int8(model, written, tmp_path):
    """All linear layers and nothing else, such as the matrix of random features."""
    count = quantize_linears(written[0], tmp_path / "int8.onnx")
    assert count == sum(isinstance(module, nn.Linear) for module in model.modules())
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert sum(node.op_type == "MatMulInteger" for node in nodes) == count
    whole, file = load_exported(written[0]), load_exported(tmp_path / "int8.onnx")
    assert file.metadata["classes"] == whole.metadata["classes"]
    images = torch.randn(8, 3, 64, 80)
    wanted = whole(images)
    assert 0 < (file(images) - wanted).norm() < 0.1 * wanted.norm()
    assert (tmp_path / "int8.onnx").stat().st_size < written[0].stat().st_size


def test_static_int8_does_not_depend_on_the_batches(model, written, tmp_path):
    """Ranges are the same, and applied: images far beyond them are clipped."""
    images = torch.randn(20, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for file, batches in zip(files, ([images], images.split(3))):
        assert quantize_linears(written[0], file, batches)
    one, two = map(load_exported, files)
    wanted, found = load_exported(written[0])(images), one(images)
    assert torch.equal(found, two(images))
    assert 0 < (found - wanted).norm() < 0.2 * wanted.norm()
    kinds = {node.op_type for node in onnx.load(files[0]).graph.node}
    assert "QuantizeLinear" in kinds
    assert "DynamicQuantizeLinear" not in kinds


@pytest.mark.long
def test_random_shift_is_exported_as_it_is_evaluated(tmp_path):
    """A model in training mode is not changed."""
    own = {"longformer": {"mode": 1, "backend": "chunk_handgrad"}}
    model = perturb(MsViT(parse_arch("l1,h2,d8,n2,p4,f2,a0"), img_size=32, attention_args=own))
    model.train()
    export_model(model, tmp_path / "m.pt2", size=(32, 32), dynamic=())
    assert model.training
    assert {block.attn.backend for block in model.stages[0].blocks} == {"chunk_handgrad"}
    assert difference(load_exported(tmp_path / "m.pt2"), model.eval(), (1, 32, 32)) < 1e-4


@pytest.mark.long
def test_fixed_sizes_are_fixed(tmp_path):
    model = perturb(MsViT(parse_arch("l1,h1,d8,n1,p4,f2,a1"), img_size=24, in_chans=1))
    differences = export_model(model, tmp_path / "m.pt2", size=(20, 30), dynamic=["batch"])
    assert [each.shape for each in differences] == [
        (1, 1, 20, 30),
        (3, 1, 20, 30),
        (2, 1, 20, 30),
    ]
    file = load_exported(tmp_path / "m.pt2")
    assert file(torch.randn(4, 1, 20, 30)).shape == (4, 1000)
    with pytest.raises(Exception, match="20"):
        file(torch.randn(4, 1, 24, 30))


def test_an_empty_batch_has_empty_outputs(tmp_path):
    model = MsViT(parse_arch("l1,h1,d8,n1,p4,s0,a1"), img_size=24, num_classes=3)
    export_model(model, tmp_path / "m.pt2", size=(24, 24))
    assert load_exported(tmp_path / "m.pt2")(torch.zeros(0, 3, 24, 32)).shape == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_rpb"])
def test_published_architectures(name, format, tmp_path):
    model = perturb(vil.get_model(name), noise=0.05)  # more noise makes deep models chaotic
    export_model(model, tmp_path / FILES[format], size=(224, 224))
    file = load_exported(tmp_path / FILES[format])
    for size in ((1, 224, 224), (3, 256, 320)):
        assert difference(file, model, size) < 1e-4, size


# Errors


class ChangesWhenTraced(nn.Module):
    """Computes something else while it is traced."""

    def forward(self, x):
        return x.mean((2, 3)) + (0.01 if torch.compiler.is_compiling() else 0.0)


class InSmallUnits(ChangesWhenTraced):
    def forward(self, x):
        return 1e-5 * super().forward(x)


class DataDependent(nn.Module):
    """Has a graph that depends on the values of the input."""

    def forward(self, x):
        return x.flatten(1)[:, : int(x.sum().item() > 0) + 2]


@pytest.mark.parametrize("before", [None, b"an older file"])
def test_a_file_that_differs_is_not_written(tmp_path, before):
    path = tmp_path / "m.pt2"
    if before:
        path.write_bytes(before)
    with pytest.raises(
        ExportError, match=r"m\.pt2 was not written: .* 1 x 3 x 8 x 8 images .* by 1\.0"
    ):
        export_model(ChangesWhenTraced(), path, size=(8, 8), dynamic=())
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([before] if before else [])


def test_numbers_in_small_units_are_compared_too(tmp_path):
    options = dict(size=(8, 8), dynamic=(), compared=lambda outputs: outputs / 1e-5)
    with pytest.raises(ExportError, match=r"differ from those of the model by 1\.0e-02"):
        export_model(InSmallUnits(), tmp_path / "m.pt2", **options)


def test_tracing_errors_are_one_line(tmp_path):
    with pytest.raises(
        ValueError, match="cannot be exported as a torch.export program: "
    ) as caught:
        export_model(DataDependent(), tmp_path / "m.pt2", size=(8, 8), dynamic=())
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "settings", "error", "message"),
    [
        ("m.bin", {}, ValueError, r"unknown ending '.bin' \(choices: .onnx, .pt2\)"),
        ("m.onnx", {"dynamic": ["bach"]}, ValueError, "keep dynamic 'bach'; did you mean 'batch'"),
        ("m.onnx", {"size": (64, 7)}, ValueError, "64x7 are too small: .* at least 8"),
        ("m.pt2", {"size": (64, 15)}, ValueError, "64x15 are too small .* 24 pixels: export"),
        (
            "m.onnx",
            {"opset": 9},
            ValueError,
            f"opset 9 is not supported: choose from {FIRST_OPSET} ",
        ),
        ("no/where.pt2", {"dynamic": ()}, OSError, "No such file"),
    ],
)
def test_bad_settings_raise(file, settings, error, message, absolute, tmp_path):
    with pytest.raises(error, match=message):
        export_model(absolute, tmp_path / file, **({"size": (64, 64)} | settings))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILES.values())
def test_a_missing_file_is_named(name, tmp_path):
    with pytest.raises(CheckpointError, match=rf"^no exported file at .*{name}: check the path$"):
        load_exported(tmp_path / name)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(package, absolute, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"ONNX needs {package}: pip install 'vil\[export\]'"):
        export_model(absolute, tmp_path / "m.onnx", size=(64, 64))
