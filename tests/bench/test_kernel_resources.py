"""Resources are read correctly from what the compilers and disassemblers print."""

import pytest

from vil.bench.kernel_resources import (
    AMDGCN,
    SASS,
    blocks_per_sm,
    count_instructions,
    count_matmuls,
    parse_amd_usage,
    parse_usage,
)

LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R2 ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R12, R8 ;
        /*0040*/                   LDL.LU R2, [R1] ;
        /*0050*/               @P0 BRA 0x30 ;
        /*0060*/                   LDL R3, [R1+0x4] ;
        /*0070*/              @!P1 EXIT ;
        /*0080*/                   HGMMA.64x32x16.F32 R24, gdesc[UR8] ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0 ;
"""
AMD = """
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	s_cbranch_scc1 .LBB0_2
.LBB0_1:                                ; =>This Inner Loop
	v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
	scratch_load_dword v1, off, off
	s_cbranch_vccnz .LBB0_1
.LBB0_2:
	scratch_store_dword off, v1, off
	s_endpgm
"""


def test_instructions_of_cuda_are_counted():
    found = count_instructions(LOOP, SASS)
    assert found == dict(tensor=2, async_copy=1, local=3, loop_local=1)


def test_instructions_of_amd_are_counted():
    found = count_instructions(AMD, AMDGCN)
    assert found == dict(tensor=1, async_copy=0, local=2, loop_local=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no instruction", "has no instruction"),
        ("        /*0000*/  STL [R1], R2 ;\n        /*0010*/  BRA 0x70 ;", "no known target"),
    ],
)
def test_a_text_that_is_no_disassembly_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        count_instructions(text, SASS)


def test_usage_is_read():
    line = " Function f:\n  REG:168 STACK:24 SHARED:0 LOCAL:8 CONSTANT[0]:532 TEXTURE:0"
    assert parse_usage(line) == (168, 32)
    with pytest.raises(ValueError, match="got 2"):
        parse_usage(line + line)
    text = "    .private_segment_fixed_size: 12\n    .vgpr_count:     132\n"
    assert parse_amd_usage(text) == (132, 12)
    with pytest.raises(ValueError, match="vgpr_count"):
        parse_amd_usage("")


def test_matmuls_off_tensor_cores_are_found():
    tensor = "%1 = tt.dot %a, %b, %c : tensor<16x16xf16> -> tensor<16x16xf32, #mma>"
    scalar = "%2 = tt.dot %a, %b, %c : tensor<16x16xf32> -> tensor<16x16xf32, #blocked2>"
    hopper = "%3 = ttng.warp_group_dot %a, %b, %c : tensor<64x16xf32, #mma>"
    assert count_matmuls("\n".join([tensor, scalar, hopper])) == (3, 1)
    with pytest.raises(ValueError, match="without a layout"):
        count_matmuls("%2 = tt.dot %a, %b, %c : other")


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "blocks"),
    [
        ("sm_90", 255, 0, 4, 2),  # 2 warps in each of 4 partitions
        ("sm_90", 168, 0, 4, 3),
        ("sm_90", 169, 0, 4, 2),  # rounded up to 176
        ("sm_90", 128, 0, 4, 4),
        ("sm_90", 32, 0, 4, 16),  # all of 64 warps
        ("sm_80", 128, 81 * 1024, 4, 2),
        ("sm_80", 128, 82 * 1024, 4, 1),  # each takes 1 KiB besides
        ("sm_86", 40, 100 * 1024, 4, 0),
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 129, 40 * 1024, 4, 1),
    ],
)
def test_blocks_per_multiprocessor(target, registers, shared, warps, blocks):
    assert blocks_per_sm(target, registers, shared, warps) == blocks


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="target must be one of sm_80"):
        blocks_per_sm("sm_70", 32, 0, 4)
