"""Every backend on a GPU equals the reference; see also test_triton.py."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.common.attention_cases import PAIRWISE, name_of
from tests.common.layout_cases import ALL_LAYOUTS
from vil.ops import BACKENDS, Case, LocalBias, Window, choose
from vil.ops.testing import errors, make_inputs, run
from vil.ops.tuning import tuner
from vil.utils.timing import peak_tensor_bytes

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ON_GPU = [
    replace(case, device="cuda", head_dim=dim, dtype=dtype)
    for case, dim, dtype in zip(
        PAIRWISE,
        [16, 32, 48, 64, 96, 128] * len(PAIRWISE),
        [torch.bfloat16, torch.float16, torch.float32, torch.float32] * len(PAIRWISE),
    )
]
LAYOUTS = [
    replace(case, device="cuda", head_dim=dim)
    for case, dim in zip(ALL_LAYOUTS, [16, 32, 48, 64, 96, 128] * len(ALL_LAYOUTS))
]
LARGE = Case(
    Window((56, 56), 8), 8, 6, 64, 1, torch.bfloat16, "cuda", table_bias=True, global_bias=True
)


@pytest.mark.parametrize("case", ON_GPU + LAYOUTS, ids=name_of)
def test_backends_equal_the_reference_on_a_gpu(case):
    able = [name for name, entry in BACKENDS.items() if not entry.unsupported(case)]
    assert "triton" in able
    for what, (error, bound) in errors(case, able).items():
        if what.startswith("masked"):  # torch's memory-efficient kernel
            bound *= 2
        assert error <= bound, f"{what} is off by {error:.2e} (bound {bound:.2e}), {name_of(case)}"


def test_memory_besides_inputs_outputs_and_gradients():
    """See fused.py: tiles of biases, statistics of the queries, partial sums."""
    inputs = make_inputs(LARGE)
    few = [inputs.q, inputs.k, inputs.v]
    run(BACKENDS["triton"].attend, LARGE, inputs)  # compiled
    peak = peak_tensor_bytes(lambda: run(BACKENDS["triton"].attend, LARGE, inputs), CUDA)
    made = sum(x.nbytes for x in (*few, inputs.q, *few))  # run's copies, the output, gradients
    all_of_it = sum(x.nbytes for x in (*few, inputs.q, *few))
    assert peak - made <= 0.15 * all_of_it


def test_a_cuda_graph_repeats_a_call():
    inputs, attend = make_inputs(LARGE), BACKENDS["triton"].attend
    graph, results = torch.cuda.CUDAGraph(), []
    run(attend, LARGE, inputs)  # compiled
    with torch.no_grad():
        bias = LocalBias(inputs.table, inputs.to_global)
        call = partial(attend, window=LARGE.window, num_global=LARGE.num_global, bias=bias)
        expected = call(inputs.q, inputs.k, inputs.v)
        with torch.cuda.graph(graph):
            results.append(call(inputs.q, inputs.k, inputs.v))
        inputs.q.neg_()
        graph.replay()
        assert not torch.equal(results[0], expected)
        assert torch.equal(results[0], call(inputs.q, inputs.k, inputs.v))


def test_the_tuner_selects_triton():
    torch.set_float32_matmul_precision("high")  # as AMP.TF32 does; checks disable it
    trials = tuner.tune(LARGE, ["triton", "chunk_handgrad", "gathered", "blocked"], rounds=5)
    torch.set_float32_matmul_precision("highest")
    assert not any(trial.reason for trial in trials), trials
    assert choose(LARGE) == "triton"
