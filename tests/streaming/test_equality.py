"""Streamed outputs equal those of the whole image: masks, global tokens, blocks, positions, sizes
and strip heights."""

import itertools

import pytest
import torch

import vil
from tests.common.marks import cases
from tests.common.small_tasks import DETECTOR
from tests.common.streaming import (
    FP32,
    FP64,
    all_outputs,
    largest_difference,
    make_image,
    make_model,
    run_strips,
    run_whole,
)

# Windows and patches that do not divide each other, so that strips, chunks and patches are ragged.
ARCH = (
    "l1,h1,d4,n{n0},s1,g{g},p4,f3,a{a}_l2,h2,d8,n{n1},s1,g{g},p2,f2,a{a}"
    "_l3,h2,d8,n{n2},s1,g{g},p3,f5,a{a}"
)
LOCAL = "longformer"
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}
# The smallest has one patch in the last stage, the others cut rows off below each stage.
SIZES = [(24, 24), (131, 47), (61, 250)]


def arch(num_global: int, blocks=(1, 2, 1), absolute: int = 0) -> str:
    return ARCH.format(g=num_global, a=absolute, **{f"n{i}": n for i, n in enumerate(blocks)})


def assert_equal(model, size, strips, tolerance=FP64, dtype=torch.float64):
    image = make_image(size, dtype=dtype)
    expected = run_whole(model, image)
    for num_chunks in strips:
        result = run_strips(model, image, num_chunks)
        difference = largest_difference(result.outputs, expected)
        assert difference <= tolerance, f"strips of {num_chunks}: {difference}"


# every pair of a mask, a number of global tokens and a size
LATIN = [
    (mask, num_global, SIZES[(i + num_global) % 3])
    for i, mask in enumerate(MASKS)
    for num_global in (0, 1, 2)
]


@pytest.mark.parametrize(("mask", "num_global", "size"), LATIN, ids=str)
def test_masks_and_global_tokens(mask, num_global, size):
    model = make_model(arch(num_global), sw_exact=MASKS[mask])
    assert_equal(model, size, (1, 3, 99))


@pytest.mark.parametrize("num_global", [0, 1])
@pytest.mark.parametrize(
    ("blocks", "number"), [((4, 1, 1), 0), ((1, 3, 4), 1), ((2, 2, 2), 0)], ids=str
)
def test_blocks_and_positions(num_global, blocks, number):
    """Every pair of a number of global tokens, blocks and positions, absolute (1) or not (0)."""
    model = make_model(arch(num_global, blocks, absolute=(number + num_global) % 2))
    assert_equal(model, (163, 59), (1, 4))


@pytest.mark.parametrize("mask", cases(MASKS, long=("chunks", "cyclic")))
def test_every_strip_height(mask):
    model = make_model(arch(1, (2, 1, 2)), sw_exact=MASKS[mask])
    assert_equal(model, (300, 45), range(1, 26))


@pytest.mark.parametrize("extra", [1, 2])
def test_cyclic_strips_that_almost_cover_the_grid(extra):
    """The first strip needs all rows. It overwrites them before the last strip needs the top."""
    model = make_model("l1,h1,d4,n3,s1,g1,p4,f3,a0", sw_exact=-1)
    for num_chunks in (2, 4):
        assert_equal(model, (12 * (num_chunks + extra), 40), (num_chunks,))


@pytest.mark.parametrize(
    ("changes", "settings", "num_chunks"),
    [
        (("g1", "g1"), {"avg_pool": True}, 1),
        (("g1", "g2"), {"share_weights": False}, 2),
        (("g1", "g1"), {"share_weights": False, "sw_exact": -1}, 1),
        (("g1", "g1"), {"mode": -1}, 1),
        (("g1", "g0"), {"mode": -1, "sw_exact": -1}, 2),
        (("g1", "g1"), {"norm_embed": False, "qkv_bias": False}, 2),
        (("a0", "a1"), {"pos_resize": "crop", "img_size": 400}, 1),
    ],
    ids=str,
)
def test_settings_of_models(changes, settings, num_chunks):
    model = make_model(arch(1, (2, 2, 1)).replace(*changes), **settings)
    assert_equal(model, (130, 61), (num_chunks,))


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", ""])
def test_pooling_of_maps(pool):
    """Without pooling, logits and features are maps, of a head that maps each token alone."""
    model = make_model(arch(0))
    model.set_global_pool(pool)
    if not pool:
        layers = [torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 3)]
        model.head, model.num_classes = torch.nn.Sequential(*layers).double(), 3
    assert_equal(model, (131, 47), (1, 3))


@pytest.mark.parametrize("attention", ["global", "longformer,full", "full,longformer", "full"])
@pytest.mark.parametrize("num_global", [1, 2])
def test_other_attentions(attention, num_global):
    model = make_model(arch(num_global, (2, 2, 1)), attention)
    assert_equal(model, (130, 61), (1, 3))


@pytest.mark.parametrize("absolute", [0, 1])
@pytest.mark.parametrize("num_global", [0, 2])
def test_stages_of_full_attention(num_global, absolute):
    """As in ViL: local stages, then stages of full attention."""
    text = arch(num_global, (1, 2, 2), absolute)
    model = make_model(text[: text.index("_l3")] + "_l3,h2,d8,n3,s0,g0,p2,f7,a0")
    assert_equal(model, (163, 59), (1, 4))


def test_only_the_logits():
    """Nothing of the last block but its global tokens is needed, and no stage's map."""
    for num_global, pool in itertools.product((0, 1), (False, True)):
        model = make_model(arch(num_global, (1, 2, 2)), avg_pool=pool)
        image = make_image((131, 90))
        result = run_strips(model, image, 1, ("logits",))
        assert largest_difference(result.outputs, run_whole(model, image)) <= FP64


def test_maps_alone_need_no_later_stage():
    """A model whose last stage would be refused streams the maps below it."""
    model = make_model(arch(1), "longformer/longformer/linformer")
    image = make_image((131, 90))
    result = run_strips(model, image, 1, ("stages.1", "stages.0"))
    assert list(result.outputs) == ["stages.1", "stages.0"]
    assert largest_difference(result.outputs, run_whole(model, image)) <= FP64


@pytest.mark.parametrize("mask", MASKS)
def test_float32(mask):
    model = make_model(arch(1, (2, 2, 2)), sw_exact=MASKS[mask], dtype=torch.float32)
    assert_equal(model, (163, 90), (1, 4), FP32, torch.float32)


@pytest.mark.parametrize(
    ("num_global", "attention"), [(0, LOCAL), (1, LOCAL), (1, f"{LOCAL},full")]
)
def test_bfloat16_autocast(num_global, attention):
    """Streaming adds no error: at most twice that of the whole image, both against float64."""
    model = make_model(arch(num_global, (1, 2, 1)), attention, dtype=torch.float32)
    image = make_image((131, 90), dtype=torch.float32)
    exact = run_whole(make_model(arch(num_global, (1, 2, 1)), attention), image.double())
    with torch.autocast("cpu", torch.bfloat16):
        whole, result = run_whole(model, image), run_strips(model, image, 1)
    for name, value in result.outputs.items():
        assert value.dtype == whole[name].dtype, name
        one, two = {name: whole[name]}, {name: value}
        assert largest_difference(two, exact) <= 2 * largest_difference(one, exact) + 2**-9


@pytest.mark.parametrize("backend", ["chunk_handgrad", "masked", "gathered", "unfold_tensor"])
def test_backends(backend):
    model = make_model(arch(1, (1, 2, 1)), sw_exact=1)
    expected = run_whole(model, make_image((131, 47)))
    for module in model.modules():
        if getattr(module, "backend", None) == "auto":
            module.backend = backend
    result = run_strips(model, make_image((131, 47)), 2)
    assert largest_difference(result.outputs, expected) <= FP64


def test_tokens_on_disk(tmp_path):
    model = make_model(arch(1, (2, 3, 2)))
    image = make_image((163, 90))
    result = run_strips(model, image, 1, folder=tmp_path)
    assert largest_difference(result.outputs, run_whole(model, image)) <= FP64
    in_memory = run_strips(model, image, 1)
    assert all(torch.equal(result[name], in_memory[name]) for name in all_outputs(model))


@pytest.mark.parametrize(
    ("size", "memory"),
    [
        ((99, 60), "330KiB"),
        pytest.param((300, 211), "1GiB", marks=pytest.mark.long),
        pytest.param((300, 211), "6MiB", marks=pytest.mark.long),
    ],
)
def test_chosen_plans(size, memory, tmp_path):
    """`vil.stream` itself, with nearly the least limit and with generous ones."""
    model = make_model(arch(1, (1, 2, 2)))
    image = make_image(size)
    expected = run_whole(model, image)
    options = dict(outputs=all_outputs(model), memory=memory, scratch=tmp_path)
    result = vil.stream(model, image, **options)
    assert largest_difference(result.outputs, expected) <= FP64


@pytest.mark.long
@pytest.mark.parametrize(("num_global", "mask"), [(0, "exact"), (2, "chunks"), (2, "cyclic")])
def test_large_images(num_global, mask):
    model = make_model(arch(num_global, (1, 4, 2)), sw_exact=MASKS[mask])
    assert_equal(model, (1500, 1111), (1, 7))
    assert_equal(model, (700, 1501), (3,))


@pytest.mark.detection
def test_the_maps_of_a_detector_s_backbone():
    overrides = dict(word.split("=", 1) for word in DETECTOR)
    body = vil.build_model(None, overrides).eval().backbone.body
    image = make_image((131, 90), dtype=torch.float32)
    with torch.no_grad():
        expected = body.forward_intermediates(image[None], intermediates_only=True)
    names = [f"stages.{i}" for i in range(len(expected))]
    result = run_strips(body, image, 1, names)
    expected = {name: each[0] for name, each in zip(names, expected)}
    assert largest_difference(result.outputs, expected) <= FP32
