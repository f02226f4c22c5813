"""Run the Triton backend in a process of its own, because Triton decides at import how it runs."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from vil.ops import Case, LocalBias
from vil.ops.backends.triton import fused
from vil.ops.call import Call
from vil.ops.testing import Inputs, make_inputs


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A pool of one new process with this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        pool.submit(int).result()  # start it now
    with pool:
        yield pool


def passes(call: Call, dout: Tensor) -> list[Tensor | None]:
    """out, lse and all gradients."""
    out, lse = fused.forward(call)
    return [out, lse, *fused.backward(call, out, lse, dout)]


def run_case(case: Case, inputs: Inputs | None = None) -> list[Tensor]:
    """out, lse and those gradients that are not None. inputs: random ones if None."""
    inputs = make_inputs(case) if inputs is None else inputs
    bias = LocalBias(inputs.table, inputs.to_global)
    call = Call(inputs.q, inputs.k, inputs.v, case.window, case.num_global, bias, inputs.valid_hw)
    return [x for x in passes(call, inputs.cotangent) if isinstance(x, torch.Tensor)]
