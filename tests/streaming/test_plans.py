"""What a plan says, and what is refused before any work."""

import numpy as np
import pytest
import torch

import vil
from tests.common.streaming import FP64, all_outputs, make_image, make_model, run_whole
from vil.errors import ConfigError
from vil.streaming import prepare
from vil.streaming.plan import parse_bytes

ARCH = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n3,s1,g1,p2,f2,a0_l3,h2,d8,n2,s1,g0,p2,f2,a0"
TWO = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n3,s1,g1,p2,f2,a0"
SIZE, LOW = (4000, 80), "800KiB"  # too little for the tokens
FULL = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n1,s0,g1,p1,f2,a0"


@pytest.fixture(scope="module")
def model():
    return make_model(ARCH)


@pytest.mark.long
def test_a_plan_says_what_each_stage_does(model):
    plan = vil.plan_stream(model, (640, 480), "64MiB")
    first, second, third = plan.stages
    assert (first.action, second.action, third.action) == ("recompute", "memory", "recompute")
    assert (second.num_passes, second.num_barriers) == (3, 2)
    assert [stage.grid for stage in plan.stages] == [(160, 120), (80, 60), (40, 30)]
    assert (first.halo, second.halo, third.halo) == (3, 2, 2)
    assert second.store_bytes == 80 * 60 * 8 * 8
    assert plan.peak_bytes == max(stage.peak_bytes for stage in plan.stages) <= 64 * 2**20
    assert 1 <= plan.work_ratio < 1.1
    for text in ("stages.1", "in memory", "recompute", "64 rows", "80 x 60", "halo"):
        assert text in str(plan)


@pytest.mark.long
def test_a_lower_limit_moves_tokens_to_disk():
    model = make_model(TWO)
    high, low = (vil.plan_stream(model, SIZE, memory) for memory in ("1GiB", LOW))
    assert low.peak_bytes <= parse_bytes(LOW) < high.peak_bytes
    assert low.stages[1].action == "scratch"
    assert low.scratch_bytes == 2 * high.stages[1].store_bytes
    assert low.work_ratio > high.work_ratio


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_least_limit_is_named_and_works(dtype):
    model = make_model(TWO, dtype=dtype)
    with pytest.raises(ConfigError, match="the smallest possible limit is") as error:
        vil.plan_stream(model, SIZE, 1000)
    least = int(str(error.value).rpartition("(")[2].split()[0])
    plan = vil.plan_stream(model, SIZE, least)
    assert plan.peak_bytes <= least
    assert bool(plan.scratch_bytes) == ("scratch=DIR or --scratch DIR" in str(error.value))
    with pytest.raises(ConfigError, match="the smallest possible limit is"):
        vil.plan_stream(model, SIZE, least - least // 10)


@pytest.mark.long
def test_tokens_on_disk_need_a_folder(tmp_path):
    model = make_model(TWO)
    image = make_image(SIZE)
    with pytest.raises(ConfigError, match="give scratch="):
        vil.stream(model, image, memory=LOW)
    found = vil.stream(model, image, memory=LOW, scratch=tmp_path / "new").logits
    expected = run_whole(model, image)["logits"]
    assert (found - expected).abs().max() <= FP64 * expected.abs().max()
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="scratch"):
        vil.stream(model, image, memory=LOW, scratch=tmp_path / "file")


@pytest.mark.parametrize("text", ["", "0", "1XB", "nan"])
def test_sizes_that_are_none(model, text):
    with pytest.raises(ConfigError, match="memory must be a number of bytes"):
        vil.plan_stream(model, (64, 64), text)


@pytest.mark.long
def test_full_attention_takes_two_passes():
    assert vil.plan_stream(make_model(FULL), (640, 640)).stages[1].num_passes == 2


def test_full_attention_is_refused_beyond_a_limit():
    model = make_model(FULL)
    with pytest.raises(ConfigError, match=r"stages\.1 .*6,250,000 tokens.* s1 instead of s0"):
        vil.plan_stream(model, (10_000, 10_000))


@pytest.mark.parametrize("attention", ["linformer", "performer", "srformer", "pattern"])
def test_attentions_that_do_not_stream_are_named(attention):
    model = make_model(FULL.replace("s0", "s1"), f"longformer/{attention}", img_size=64)
    with pytest.raises(ConfigError, match=r"stages\.1\.blocks\.0\.attn cannot be streamed: .+"):
        vil.plan_stream(model, (64, 64))


def test_models_that_do_not_stream_are_named(model):
    with pytest.raises(ConfigError, match="Linear cannot be streamed"):
        vil.plan_stream(torch.nn.Linear(3, 3), (64, 64))
    with pytest.raises(ConfigError, match="stream its module '0' instead"):
        vil.plan_stream(torch.nn.Sequential(model), (64, 64))
    reversible = make_model(ARCH, reversible=True)
    with pytest.raises(ConfigError, match=r"stages\.0 cannot be streamed: .*reversible"):
        vil.plan_stream(reversible, (64, 64))
    dropping = make_model(ARCH, drop_path_rate=0.5)
    prepare(dropping, make_image((64, 64)))
    with pytest.raises(ConfigError, match=r"dropout, which cannot be streamed: call"):
        vil.plan_stream(dropping.train(), (64, 64))
    no_map = make_model(ARCH.replace("g0", "g1"))
    no_map.set_global_pool("")
    with pytest.raises(ConfigError, match="output is not a map"):
        vil.plan_stream(no_map, (64, 64))
    wide = make_model(ARCH)
    wide.set_global_pool("")
    wide.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(1))
    with pytest.raises(ConfigError, match=r"head\.1 cannot be streamed: Softmax"):
        vil.plan_stream(wide, (64, 64))


def test_outputs_that_do_not_exist(model):
    for outputs in (("logit",), (), ("stages.3",)):
        with pytest.raises(ConfigError, match="output"):
            vil.plan_stream(model, (64, 64), outputs=outputs)


def test_maps_are_written_into_arrays(model, tmp_path):
    zarr = pytest.importorskip("zarr")
    image = make_image((131, 90))
    shapes = {"stages.0": (4, 32, 22), "stages.1": (8, 16, 11), "stages.2": (8, 8, 5)}
    options = dict(mode="w", shape=shapes["stages.1"], chunks=(8, 5, 5), dtype="f8")
    into = {
        "stages.0": np.full(shapes["stages.0"], np.nan),
        "stages.1": zarr.open(str(tmp_path / "a.zarr"), **options),
        "stages.2": torch.full(shapes["stages.2"], torch.nan).double(),
    }
    run = prepare(model, image, outputs=all_outputs(model), into=into)
    result = run.execute(run.planner.with_strips(1))
    for name, expected in run_whole(model, image).items():
        if name in into:
            assert result[name] is into[name]
        found = torch.as_tensor(np.asarray(result[name][:]))
        assert (found - expected).abs().max() <= FP64 * expected.abs().max(), name


def test_arrays_that_do_not_fit_are_refused(model, tmp_path):
    zarr = pytest.importorskip("zarr")
    image, shape = make_image((131, 90)), (4, 32, 22)
    frozen = np.zeros(shape)
    frozen.flags.writeable = False
    zarr.open(str(tmp_path / "a.zarr"), mode="w", shape=shape, dtype="f4")
    refused = {
        r"shape \(4, 32, 21\), but the map needs \(4, 32, 22\)": np.zeros((4, 32, 21)),
        "type uint8": np.zeros(shape, np.uint8),
        "is read-only": frozen,
        r"'stages.0'\] is read-only": zarr.open(str(tmp_path / "a.zarr"), mode="r"),
    }
    for message, array in refused.items():
        with pytest.raises(ConfigError, match=message):
            vil.stream(model, image, outputs="stages.0", into={"stages.0": array})
    for name, message in {"logits": "is a vector", "stages.1": "the outputs are"}.items():
        options = dict(outputs=("logits", "stages.0"), into={name: np.zeros(shape)})
        with pytest.raises(ConfigError, match=message):
            vil.stream(model, image, **options)
