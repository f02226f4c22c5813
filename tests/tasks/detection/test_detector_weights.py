"""Which weights a detector starts from, and what it says of them."""

import pytest
import torch
from safetensors.torch import save_file

from tests.common.detection.detectors import ARCH, detector, small_body
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import get_2021_names
from vil.tasks.detection.models.detectors import DETECTORS
from vil.tasks.detection.models.weights import load_detector
from vil.utils.errors import CheckpointError


def classifier(arch: str = ARCH.format(a=0), **own) -> MsViT:
    torch.manual_seed(5)
    return MsViT(parse_arch(arch, "longformer"), **dict(img_size=160, num_classes=7) | own)


def saved(state: dict[str, torch.Tensor], path):
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def theirs(model: MsViT, prefix: str = "") -> dict[str, torch.Tensor]:
    """A state dict with the reference's names."""
    names = get_2021_names(model)
    return {prefix + names[name]: value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("names", ["ours", "the reference's", "its detector's"])
def test_the_body_is_that_of_a_classifier_or_of_a_detector(kind, names, tmp_path):
    source = classifier()
    state = {
        "ours": source.state_dict(),
        "the reference's": theirs(source),
        "its detector's": theirs(source, "backbone.bottom_up.")
        | {"roi_heads.box_predictor.cls_score.weight": torch.zeros(4, 8)},
    }[names]
    model = detector(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_detector(model, saved(state, tmp_path / "weights.safetensors"))
    after = model.state_dict()
    for name, value in source.state_dict().items():
        if not name.startswith(("norm.", "head.")):
            assert torch.equal(after[f"backbone.body.{name}"], value)
    heads = [name for name in after if not name.startswith("backbone.body.")]
    assert all(torch.equal(after[name], before[name]) for name in heads)
    assert len(report.ignored) == 4 + (names == "its detector's")
    assert len(report.loaded) + 4 == len(source.state_dict())


def test_positions_of_another_size_and_full_attention_are_converted(tmp_path):
    dense = classifier(ARCH.format(a=1).replace("n1,s1,g0", "n1,s0,g0"), img_size=96)
    model = detector(absolute=1)
    report = load_detector(model, saved(dense.state_dict(), tmp_path / "dense.safetensors"))
    assert len(report.resized) == 6  # rows and columns of three stages
    assert len(report.converted) == 4  # query and kv of qkv, weight and bias
    query = model.backbone.body.stages[2].blocks[0].attn.query.weight
    assert torch.equal(query, dense.stages[2].blocks[0].attn.qkv.weight[:128])


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_detector_of_ours_is_loaded_whole(kind, tmp_path):
    source, model = detector(kind), detector(kind)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    load_detector(model, saved(source.state_dict(), tmp_path / "d.safetensors"), strict=True)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("kind", DETECTORS)
def test_other_categories_need_a_new_head(kind, tmp_path):
    path = saved(detector(kind, classes=5).state_dict(), tmp_path / "five.safetensors")
    model = detector(kind, classes=3)
    with pytest.raises(CheckpointError, match="a head of another size"):
        load_detector(model, path)
    report = load_detector(model, path, head="new")
    count = {"mask_rcnn": 6, "faster_rcnn": 4, "retinanet": 2}[kind]
    assert len(report.fresh) == count
    assert len(report.loaded) == len(model.state_dict()) - count


@pytest.mark.parametrize("kind", DETECTORS)
def test_another_kind_of_detector_gives_what_both_have(kind, tmp_path):
    source = detector("retinanet" if kind == "mask_rcnn" else "mask_rcnn")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    path = saved(source.state_dict(), tmp_path / "other.safetensors")
    model = detector(kind)
    with pytest.raises(CheckpointError, match="another kind of detector.*FINETUNE.HEAD to new"):
        load_detector(model, path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_detector(model, path, head="new")
    after, theirs = model.state_dict(), source.state_dict()
    for name, value in after.items():
        assert torch.equal(value, before[name] if name in report.fresh else theirs[name])
    assert set(report.loaded) == after.keys() - set(report.fresh)
    assert set(report.ignored) == theirs.keys() - set(report.loaded)
    shared = ["backbone.body."]
    if kind == "faster_rcnn":
        shared += ["backbone.fpn", "rpn.head.conv", "roi_heads.box_head"]
    for prefix in shared:
        assert not any(name.startswith(prefix) for name in report.fresh)


def test_a_classifier_is_not_evaluated_as_a_detector(tmp_path):
    path = saved(classifier().state_dict(), tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match="the heads would be random: use the file"):
        load_detector(detector(), path, strict=True)


@pytest.mark.defect("B34")
def test_weights_that_fit_nothing(tmp_path):
    other = {"conv1.weight": torch.zeros(3, 3), "fc.bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="no name matches"):
        load_detector(detector(), saved(other, tmp_path / "other.safetensors"))
    wider = classifier(ARCH.format(a=0).replace("d64", "d128"))
    with pytest.raises(CheckpointError, match="the weights do not fit the model"):
        load_detector(detector(), saved(wider.state_dict(), tmp_path / "wider.safetensors"))


@pytest.mark.defect("B33")
def test_layers_and_decay_of_the_body_are_those_of_the_classifier():
    model, body = detector(), small_body()
    for name, _ in body.named_parameters():
        if not name.startswith(("norm.", "head.")):
            assert model.layer_of(f"backbone.body.{name}") == body.layer_of(name)
    assert model.layer_of("rpn.head.cls_logits.bias") == model.num_layers == body.num_layers
    kept = {name.removeprefix("backbone.body.") for name in model.no_weight_decay()}
    assert kept == {n for n in body.no_weight_decay() if not n.startswith(("norm.", "head."))}


@pytest.mark.trust(5)
@pytest.mark.parametrize("part", ["body", "head"])
def test_weights_that_are_not_finite_are_refused(tmp_path, part):
    model = detector("retinanet")
    name = next(n for n, _ in model.named_parameters() if ("body" in n) is (part == "body"))
    with torch.no_grad():
        dict(model.named_parameters())[name].flatten()[0] = float("nan")
    save_file(model.state_dict(), tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has NaN or infinite values"):
        load_detector(detector("retinanet"), tmp_path / "bad.safetensors")
