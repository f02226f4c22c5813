"""The architecture grammar and the attention of each block: parsing, formatting, errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vil.layers.attention import ATTENTIONS
from vil.models.arch import StageSpec, format_arch, format_attention, parse_arch
from vil.models.registry import ARCHS

pytestmark = pytest.mark.smoke


@st.composite
def stages(draw) -> StageSpec:
    heads = draw(st.integers(1, 4))
    return StageSpec(
        dim=2 * heads * draw(st.integers(1, 8)),
        num_heads=heads,
        attention=tuple(draw(st.lists(st.sampled_from(list(ATTENTIONS)), max_size=5))),
        num_global=draw(st.integers(0, 3)),
        patch=draw(st.integers(1, 4)),
        attn_size=draw(st.integers(1, 300)),
        absolute=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(stages(), min_size=1, max_size=5))
def test_stages_round_trip(specs):
    assert parse_arch(format_arch(specs), format_attention(specs)) == specs


def test_blocks_cycle_through_names_and_the_last_part_holds_for_later_stages():
    specs = parse_arch("l1,n1_l2,n3_l3,n2,s0_l4,n2", "linformer/longformer,full")
    assert [spec.attention for spec in specs] == [
        ("linformer",),
        ("longformer", "full", "longformer"),
        ("full", "full"),
        ("longformer", "full"),
    ]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("", "attention '' has an empty name for stage 1"),
        ("longformer/", "'longformer/' has an empty name for stage 2"),
        ("full/full/global", "has names for 3 stages, but ARCH has only 2 stages"),
    ],
)
def test_malformed_attention_strings_raise(attention, message):
    with pytest.raises(ValueError, match=message):
        parse_arch("l1_l2", attention)


@pytest.mark.defect("B5")
def test_full_attention_in_one_stage_does_not_affect_the_next():
    stages = parse_arch("l1,s1_l2,s0_l3,s1", "longformer")
    assert [stage.attention for stage in stages] == [("longformer",), ("full",), ("longformer",)]


@pytest.mark.parametrize("name", ARCHS)
def test_named_architectures_round_trip(name):
    assert format_arch(parse_arch(ARCHS[name])) == ARCHS[name]


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("l1,h3,d96,z4", r"stage 1 \('l1,h3,d96,z4'\): unknown letter 'z' \(letters: l number"),
        ("l1,h3,d97", "must be a multiple of the number of heads .letter h., got 97 and 3"),
        ("l1_l3", "l .number of the stage. is 3, but this is stage 2"),
        ("l1,d", "'d' is not a letter followed by a number"),
        ("l1,p0", r"p \(patch side\) must be at least 1"),
    ],
)
def test_malformed_architectures_raise(arch, message):
    with pytest.raises(ValueError, match=message):
        parse_arch(arch)
