"""The Triton kernels in a stricter interpreter: addresses and integer overflow.

Triton decides at import whether it interprets kernels, so functions run in a process that does.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.common.attention_cases import make_case, name_of
from tests.common.layout_cases import CALLS, layout_case
from tests.common.marks import cases
from tests.common.triton_memory import checked_memory
from tests.common.triton_runs import process, run_case
from vil.ops import Case, Window, patterns
from vil.ops.layout import Layout
from vil.ops.testing import make_inputs

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
BOTH = (True, True)


@pytest.fixture(scope="module")
def interpreter():
    """Run functions of this file in a process that interprets kernels and checks integers."""
    with process(TRITON_INTERPRET="1") as pool:
        pool.submit(prepare).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def prepare() -> None:
    from triton.runtime import interpreter

    from vil.ops.backends.triton.launch import kernels

    kernels()  # repairs the interpreter
    assert interpreter.interpreter_builder.options.sanitize_overflow


# all chunks attend to all in the first head, and to themselves in the second
BLOCKS = torch.stack([torch.ones(4, 4), torch.eye(4)]) > 0
FEW_STEPS = Layout((4, 4), 2, patterns.from_blocks(BLOCKS, 2))
CASES = [
    replace(make_case((1, 0), (3, 4), 2, 1, BOTH, True, SINGLE), batch=1, heads=2, head_dim=20),
    replace(make_case((0, 0), (4, 3), 3, 0, (True, False), True, HALF), batch=1, heads=1),
    replace(make_case((-1, 0), (3, 5), 2, 1, BOTH, False, BRAIN), batch=1, heads=1),
    replace(make_case((0, 3), (3, 2), 2, 1, BOTH, False, BRAIN), batch=1, heads=1),
    replace(layout_case("mask per head", (4, 3), CALLS[0]), batch=1, head_dim=16),
    Case(FEW_STEPS, 1, 2, 16, 0, SINGLE, "cpu", True),
]


def run_checked(case: Case) -> tuple[list[torch.Tensor], int]:
    with checked_memory() as sizes:
        return run_case(case), sum(sizes)


@pytest.mark.parametrize(
    "case",
    cases(CASES, long=CASES[::2] + CASES[-1:], text=name_of, slow=CASES[1:-1:2]),
    ids=name_of,
)
def test_no_kernel_leaves_its_arguments_or_overflows(interpreter, case):
    results, accesses = interpreter(run_checked, case)
    assert accesses > 1000
    for result, again in zip(results, interpreter(run_case, case)):
        assert torch.equal(result, again)


FAR = 2**31 + 64  # elements between the first and the last token, head or image


def far_apart(x: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy of x whose offsets along one axis do not fit into 32 bits. Most of it is untouched."""
    strides = list(x[0, 0].stride())
    strides = [x.shape[1] * strides[0] * x.shape[2], strides[0] * x.shape[2], *strides]
    strides[axis] = -(-FAR // max(1, x.shape[axis] - 1))
    offsets = sum((size - 1) * stride for size, stride in zip(x.shape, strides))
    return torch.empty(offsets + 1, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def run_far(case: Case, axis: int) -> list[torch.Tensor]:
    inputs = make_inputs(case)
    names = ("q", "k", "v", "cotangent")
    far = {name: far_apart(getattr(inputs, name), axis) for name in names}
    assert far["q"].stride(axis) * (far["q"].shape[axis] - 1) >= 2**31
    with checked_memory():
        return run_case(case, replace(inputs, **far))


@pytest.mark.long
@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["image", "head", "token", "channel"])
def test_offsets_do_not_overflow_32_bits(interpreter, axis):
    """In windows and layouts by turns."""
    window = (Window((1, 3), 2, 1), Layout((1, 3), 2, patterns.axial()))[axis % 2]
    case = Case(window, 2, 2, 16, 1, HALF, "cpu", True, True)
    for far, near in zip(interpreter(run_far, case, axis), interpreter(run_case, case)):
        assert torch.equal(far, near)
