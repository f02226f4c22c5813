"""Load weights: 2021 files, vil files, resizing, heads, errors."""

import copy
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import vil
import vil.integrations.timm_register  # for local-dir:
from tests.common.golden import read
from tests.common.marks import cases
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import (
    get_2021_names,
    load_weights,
    read_weights,
)
from vil.utils.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = sorted(path.stem for path in GOLDEN.glob("model_*.safetensors"))
PUBLISHED = json.loads((GOLDEN / "state_dict_keys.json").read_text())
TWO = "l1,h1,d8,n1,s1,g1,p4,f2,a1_l2,h2,d16,n1,s0,g1,p2,f2,a0"


def build(arch=TWO, img_size=32, num_classes=5, **kwargs) -> MsViT:
    torch.manual_seed(0)
    return MsViT(parse_arch(arch), img_size=img_size, num_classes=num_classes, **kwargs)


EXACT = ("masked", "blocked")  # what is chosen in float64; test_attention has the other backends
KINDS = {"longformerhand": "longformer"}
OWN = {"performer": {"batch_max": True}, "srformer": {"ragged": "drop"}}  # as in the reference


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, b) for name in MODELS for b in (EXACT if "longformer" in name else ["auto"])],
)
def test_logits_and_gradients_of_the_reference(name, backend):
    meta, tensors, params, grads = read(name)
    kind = meta["attn_type"]
    model = MsViT(
        parse_arch(meta["arch"], KINDS.get(kind, kind)),
        img_size=meta["image_size"],
        num_classes=meta["num_classes"],
        norm_embed=meta["norm_embed"],
        attention_args=OWN | {"longformer": {"backend": backend}},
    )
    model = model.double().eval()
    assert load_weights(model, params).complete
    logits = model(tensors["x"])
    loss = torch.nn.functional.cross_entropy(logits, tensors["target"])
    loss.backward()
    names = get_2021_names(model)
    found = {names[key]: value.grad for key, value in model.named_parameters() if value.numel()}
    wanted = {key: value for key, value in grads.items() if value.numel()}
    assert found.keys() == wanted.keys()
    found |= {"logits": logits, "loss": loss}
    for key, value in {"logits": tensors["logits"], "loss": tensors["loss"], **wanted}.items():
        assert (found[key] - value).norm() <= 1e-9 * value.norm(), key


@pytest.mark.defect("B34")
@pytest.mark.parametrize(
    "entry",
    cases(PUBLISHED, long=[entry for entry in PUBLISHED if "tiny" not in entry["name"]]),
    ids=lambda entry: entry["name"],
)
def test_published_state_dicts_load_strictly(entry):
    """Also in detectron2's layout: the backbone under backbone.bottom_up, beside the heads. Of
    larger models, only names and shapes are compared."""
    kind, has_values = entry["attn_type"], "tiny" in entry["name"]
    attention = "global" if "global" in entry["name"] else KINDS.get(kind, kind)
    own = {name: {"share_weights": entry["share_w"]} for name in ("longformer", "global")}
    stages = parse_arch(entry["arch"], attention)
    with torch.device("cpu" if has_values else "meta"):
        model = MsViT(stages, img_size=entry["image_size"], attention_args=own)
    state = {key: torch.full(shape, 0.25) for key, shape in entry["keys"].items()}
    report = load_weights(model, state)
    assert report.complete
    assert not report.resized
    assert len(report.loaded) + len(report.ignored) == len(entry["keys"])
    unused = sum(state[key].numel() for key in report.ignored if key.endswith("bias_table"))
    assert sum(p.numel() for p in model.parameters()) == entry["params"] - unused
    assert not has_values or all((value == 0.25).all() for value in model.state_dict().values())

    state = {f"backbone.bottom_up.{key}": value + 0.25 for key, value in state.items()}
    heads = ["backbone.fpn_lateral2.weight", "proposal_generator.anchor", "roi_heads.box.weight"]
    report = load_weights(model, state | {key: torch.zeros(3) for key in heads})
    assert report.complete
    assert set(heads) <= set(report.ignored)
    assert not has_values or all((value == 0.5).all() for value in model.state_dict().values())


def test_decay_groups_of_the_reference():
    entries = json.loads((GOLDEN / "weight_decay_groups.json").read_text())
    assert {entry["attn_type"] for entry in entries} == {"longformerhand", "linformer", "srformer"}
    for entry in entries:
        stages = parse_arch(entry["arch"], KINDS.get(entry["attn_type"], entry["attn_type"]))
        model = MsViT(stages, img_size=64, num_classes=7)
        names, kept = get_2021_names(model), model.no_weight_decay()
        parameters = {name for name, p in model.named_parameters() if p.numel()}
        assert {names[name] for name in parameters & kept} == set(entry["no_decay"])
        assert {names[name] for name in parameters - kept} == set(entry["decay"])


def test_positions_are_resized_and_reported():
    source = build()
    target = build(TWO.replace("f2", "f3"), img_size=48)
    report = load_weights(target, source.state_dict())
    assert report.complete
    assert [line.split()[0] for line in report.resized] == [
        "stages.0.embed.position.x_pos_embed",
        "stages.0.embed.position.y_pos_embed",
        "stages.1.blocks.0.attn.local_relative_position_bias_table",
    ]
    assert "(49, 2) -> (121, 2)" in report.resized[-1]


def test_embeddings_are_cropped_if_the_model_crops():
    source, name = build(img_size=48), "stages.0.embed.position.x_pos_embed"
    target = build(img_size=32, pos_resize="crop")
    assert f"{name} (1, 12, 4) -> (1, 8, 4)" in load_weights(target, source.state_dict()).resized
    assert torch.equal(target.state_dict()[name], source.state_dict()[name][:, :8])
    with pytest.raises(CheckpointError, match="mismatched: .*x_pos_embed.*POS_RESIZE"):
        load_weights(build(img_size=64, pos_resize="crop"), source.state_dict())


def test_linformer_projections_are_resized():
    """As in a forward pass on another grid. A copy of the shared projection is ignored."""
    arch = "l1,h1,d8,n1,s1,g{},p8,f3,a1"
    source, target = (
        MsViT(parse_arch(arch.format(2), "linformer"), img_size=size) for size in (24, 40)
    )
    state = {get_2021_names(source)[key]: value for key, value in source.state_dict().items()}
    state["layer1.1.attn.proj_v"] = state["layer1.1.attn.proj_k"].clone()
    report = load_weights(target, state)
    assert report.ignored == ["layer1.1.attn.proj_v"]
    assert "layer1.1.attn.proj_k (11, 3) -> (27, 3)" in report.resized
    old, new = source.stages[0].blocks[0].attn, target.stages[0].blocks[0].attn
    assert torch.allclose(new.proj_k, old.fit(old.proj_k, (5, 5)), atol=1e-6)

    state["layer1.1.attn.proj_v"] += 1
    with pytest.raises(CheckpointError, match="unexpected: layer1.1.attn.proj_v"):
        load_weights(target, state)
    other = MsViT(parse_arch(arch.format(1), "linformer"), img_size=40)
    with pytest.raises(CheckpointError, match=r"mismatched: layer1.1.attn.proj_k \(11, 3\) -> "):
        load_weights(other, state)


@pytest.mark.parametrize("prefix", ["body.", "backbone.body."])
def test_a_classifier_does_not_start_from_a_detector_or_segmentation_model(prefix):
    state = {prefix + name: value for name, value in build().state_dict().items()}
    with pytest.raises(CheckpointError, match="a detector or segmentation model, from which only"):
        load_weights(build(), state | {"decoder.weight": torch.zeros(2)}, head="new")


@pytest.mark.defect("B11")
def test_heads_of_another_size(tmp_path):
    source, rows = build(num_classes=5), tmp_path / "rows.txt"
    rows.write_text("4\n0\n")
    with pytest.raises(CheckpointError, match="FINETUNE.HEAD"):
        load_weights(build(num_classes=2), source.state_dict())
    target = build(num_classes=2)
    before = target.head.weight.clone()
    assert load_weights(target, source.state_dict(), head="new").fresh == [
        "head.weight",
        "head.bias",
    ]
    assert torch.equal(target.head.weight, before)
    load_weights(target, source.state_dict(), head=f"rows:{rows}")
    assert torch.equal(target.head.weight, source.head.weight[[4, 0]])
    rows.write_text("5\n")
    with pytest.raises(CheckpointError, match="class indices from 0 to 4"):
        load_weights(target, source.state_dict(), head=f"rows:{rows}")


@pytest.mark.defect("B11")
def test_mismatches_are_listed_and_nothing_is_loaded():
    model = build()
    before = copy.deepcopy(model.state_dict())
    state = {key: torch.ones_like(value) for key, value in before.items()}
    state["stages.0.blocks.0.attn.query.weight"] = torch.ones(9, 9)
    state["surprise"] = torch.ones(1)
    del state["norm.bias"]
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, state)
    for line in (
        "missing: norm.bias",
        "unexpected: surprise",
        "mismatched: stages.0.blocks.0.attn.query.weight (9, 9) -> (8, 8)",
    ):
        assert line in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_separate_global_weights_are_not_aliases():
    """Separately trained projections must not load into shared ones."""
    separate = build(attention_args={"longformer": {"share_weights": False}})
    state = {get_2021_names(separate)[key]: value for key, value in separate.state_dict().items()}
    with pytest.raises(CheckpointError, match="unexpected: layer1.1.attn.kv_global"):
        load_weights(build(), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"net": state, "arch": "msvit", "epoch": 3},
        lambda state: {"model": {f"module.{key}": value for key, value in state.items()}},
    ],
    ids=["bare", "net", "module"],
)
def test_layouts_of_pt_files(tmp_path, wrap):
    model = build()
    state = {get_2021_names(model)[key]: value for key, value in model.state_dict().items()}
    torch.save(wrap(state), tmp_path / "weights.pth")
    target = build()
    torch.nn.init.ones_(target.head.weight)
    assert load_weights(target, read_weights(tmp_path / "weights.pth")).complete
    assert torch.equal(target.head.weight, model.head.weight)


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("canary"),))


def test_bad_files_raise_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.ones(1000)}, "good.safetensors")
    Path("cut.safetensors").write_bytes(Path("good.safetensors").read_bytes()[:900])
    torch.save({"a": torch.ones(1000)}, "good.pth")
    Path("cut.pth").write_bytes(Path("good.pth").read_bytes()[:900])
    Path("text.pth").write_text("hello")
    Path("empty.pth").touch()
    torch.save({"net": Trap()}, "trap.pth")
    torch.save({"net": Trap()}, "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"net": [1, 2]}, "list.pth")
    messages = {
        "absent.pth": "no weight file",
        "cut.safetensors": "damaged",
        "cut.pth": "damaged",
        "text.pth": "not a weight file: it was not written by torch.save",
        "empty.pth": "it is truncated",
        "trap.pth": "pickled objects",
        "old.pth": "pickled objects",
        "list.pth": "not a state dict",
    }
    for name, message in messages.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            read_weights(name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "weights_only" not in str(caught.value)  # no advice to run what is in the file
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    ("size", "other"), [((64, 96), (96, 64)), (64, (32, 160)), ((64, 96), 96)], ids=str
)
def test_tables_of_images_that_are_not_square(tmp_path, size, other):
    """Tables of 7 x 11 and 11 x 7, or of 7 x 7 and 3 x 19 entries: the card says which."""
    model = vil.get_model("vil_tiny_rpb", img_size=size, num_classes=3)
    vil.save_pretrained(model, tmp_path)
    file, options = tmp_path / "model.safetensors", dict(img_size=other, num_classes=3)
    wanted = vil.from_pretrained(tmp_path, img_size=other).state_dict()
    found = vil.get_model("vil_tiny_rpb", weights=file, **options)
    assert found.settings["img_size"] == other
    for name, value in found.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    with pytest.raises(CheckpointError, match="use vil.from_pretrained"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=other)
