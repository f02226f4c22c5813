"""Decide whether compiled C++ code or PyTorch computes linear layers and MLPs on a CPU.

Shapes: (..., C) has any number of leading dimensions, and C channels.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.dispatch import CHOICES, DEFAULT
from vil.ops.native import library
from vil.utils.transforms import is_exporting, is_transformed

CHANNELS_UNIT = 16  # the C++ code needs numbers of channels that are multiples of this
LINEAR, NORM_LINEAR, LINEAR_RESIDUAL = "linear", "norm linear", "linear residual"
NORM_LINEAR_RESIDUAL, MLP = "norm linear residual", "mlp"
NAMES = {  # {kind of call: its name in logs}
    LINEAR: "linear layer",
    NORM_LINEAR: "norm and linear layer",
    LINEAR_RESIDUAL: "linear layer and residual",
    NORM_LINEAR_RESIDUAL: "norm, linear layer and residual",
    MLP: "norm and MLP",
}

# How the C++ code divides the work, see linear.h: at least so many tasks; from more tokens on, so
# many tokens in each; in training, at most so many gradients of weights in all tasks together.
FEWEST_TASKS, SUM_UNITS = 4, 1 << 23
ROWS_PER_TASK = {"training": 768, "evaluation": 256}
# kinds without a row of their own in NATIVE_FROM
RULED_AS = {LINEAR: LINEAR_RESIDUAL, NORM_LINEAR_RESIDUAL: NORM_LINEAR}
# {(kind, phase): {result of `library.arithmetic`: {most input channels: fewest tokens}}}: from how
# many tokens on the C++ code is selected. It is not for more channels than a row lists.
# From `vil tune` on two cores of an Intel Xeon with AMX, of one without, and of an AMD EPYC, with
# 48 to 768 channels and 50 to 50,000 tokens.
NATIVE_FROM = {
    (NORM_LINEAR, "training"): {
        "float32": {96: 3200},
        "float32 on AMD": {768: 2400},
        "bfloat16": {48: 1, 96: 800, 192: 12_800},
        "amx": {96: 1, 192: 800},
    },
    (NORM_LINEAR, "evaluation"): {
        "float32": {96: 800, 192: 3200},
        "float32 on AMD": {96: 400, 192: 150, 768: 1},
        "bfloat16": {768: 1},
        "amx": {384: 1},
    },
    (NORM_LINEAR, "optimized for inference"): {
        "float32": {192: 1},
        "float32 on AMD": {768: 1},
        "bfloat16": {768: 1},
        "amx": {192: 1},
    },
    (LINEAR_RESIDUAL, "training"): {
        "float32": {96: 12_800},
        "float32 on AMD": {96: 12_800, 768: 2400},
        "bfloat16": {96: 1, 192: 800},
        "amx": {96: 1, 192: 800},
    },
    (LINEAR_RESIDUAL, "evaluation"): {
        "float32": {48: 3200, 384: 800},
        "float32 on AMD": {96: 400, 192: 150, 768: 1},
        "bfloat16": {768: 1},
        "amx": {768: 1},
    },
    (MLP, "training"): {
        "float32": {96: 800, 192: 3200},
        "float32 on AMD": {768: 800},
        "bfloat16": {96: 1, 192: 800},
        "amx": {96: 1, 192: 800, 384: 3200},
    },
    (MLP, "evaluation"): {
        "float32": {96: 1, 192: 200, 384: 3200},
        "float32 on AMD": {768: 1},
        "bfloat16": {768: 1},
        "amx": {768: 1},
    },
    (MLP, "optimized for inference"): {
        "float32": {384: 1},
        "float32 on AMD": {768: 1},
        "bfloat16": {768: 1},
        "amx": {768: 1},
    },
}


@dataclass(frozen=True)
class LinearCase:
    """The properties of a call of a linear layer or MLP that decide which backend runs.

    kind: a key of NAMES, such as "norm linear".
    tokens: number of tokens of all images.
    dim: number of channels of a token.
    features: output features of the linear layer, or hidden channels of the MLP.
    dtype: dtype of the matmuls, for example the autocast dtype.
    needs_grad: whether autograd is enabled.
    packed: whether the weights are packed in advance, as in a model optimized for inference.
    """

    kind: str
    tokens: int
    dim: int
    features: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    needs_grad: bool = True
    packed: bool = False

    def bucket(self) -> str:
        """Return the key of this case in the tuning cache, which stores the fastest backend.

        The number of tokens in the key is rounded up to a power of two, so that similar cases share
        a key.
        """
        return self._bucket

    @cached_property
    def _bucket(self) -> str:
        dtype = f"{self.dtype} {self.device}".removeprefix("torch.")
        tokens = next_power_of_2(self.tokens)
        return f"{self.kind} {self.dim}->{self.features}, {tokens} tokens, {dtype}, {self.phase}"

    @property
    def phase(self) -> str:
        """The phase of the call: "training", "evaluation" or "optimized for inference"."""
        if self.packed:
            return "optimized for inference"
        return "training" if self.needs_grad else "evaluation"

    def unsupported(self) -> list[str]:
        """Return the reasons why the C++ backend does not support this case.

        Returns an empty list if the backend supports it.
        """
        reasons = library.unsupported(self.device, self.dtype)
        if self.dim % CHANNELS_UNIT or self.features % CHANNELS_UNIT:
            reasons.append(f"channels must be multiples of {CHANNELS_UNIT}")
        return reasons


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's matmul: x.dtype, or the autocast dtype if enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def choose(case: LinearCase) -> str:
    """Return the backend for a case, "native" or "torch".

    It is the one that tuning found fastest. If the case is not tuned, `by_rule` selects it.
    """
    name = CHOICES.get(case.bucket()) or by_rule(case)
    return "native" if name == "native" and not reasons_against(case) else "torch"


def reasons_against(case: LinearCase) -> list[str]:
    """Return the reasons why the C++ backend cannot compute a case; an empty list if it can. Loads
    the library, and compiles it first if needed."""
    return case.unsupported() or library.prepare() or case.unsupported()


def by_rule(case: LinearCase) -> str:
    """Return the backend for a case that is not tuned, from the table NATIVE_FROM. It may not
    support the case."""
    if CHOICES.get(DEFAULT) == "":
        return "torch"
    return _by_rule(case, library.arithmetic(case.dtype), torch.get_num_threads())


@lru_cache(1024)
def _by_rule(case: LinearCase, arithmetic: str, threads: int) -> str:
    kind = RULED_AS.get(case.kind, case.kind)
    limits = NATIVE_FROM.get((kind, case.phase), {}).get(arithmetic, {})
    fewest = next((tokens for dim, tokens in limits.items() if case.dim <= dim), math.inf)
    if threads > FEWEST_TASKS and not case.packed:  # is there a task for each?
        rows = ROWS_PER_TASK["training" if case.needs_grad else "evaluation"]
        weights = case.dim * case.features * (2 if case.kind == MLP else 1)
        fewest = max(fewest, rows * threads)
        if case.needs_grad and weights * threads > SUM_UNITS:
            fewest = math.inf
    return "native" if case.tokens >= fewest else "torch"


def is_native(kind: str, x: Tensor, features: int, *weights: Tensor | None) -> bool:
    """Return whether the C++ backend should compute a linear layer or an MLP of x (..., C).

    kind, features: as in `LinearCase`. weights: the parameters of the layers. Returns False under
    torch.compile, which fuses PyTorch's operators itself.
    """
    if not x.is_cpu or x.dtype not in library.DTYPES:
        return False
    if torch.compiler.is_compiling() or is_exporting():
        return False
    dim, grad = x.shape[-1], torch.is_grad_enabled()
    case = _case(kind, x.numel() // dim, dim, features, compute_dtype(x), grad)
    return choose(case) == "native" and not is_transformed(x, *weights)


@lru_cache(1024)  # a model makes the same calls in each step
def _case(*fields: Any) -> LinearCase:
    """Return the case of a call on a CPU. fields: the fields of `LinearCase` except `device`."""
    *others, needs_grad = fields
    return LinearCase(*others, needs_grad=needs_grad)


def is_packed_native(kind: str, dim: int, features: int, dtype: torch.dtype) -> bool:
    """Return whether a layer of a model optimized for inference is packed for the C++ backend.

    The rule decides, for any number of tokens. The arguments are as in `LinearCase`.
    """
    case = LinearCase(kind, 1, dim, features, dtype, needs_grad=False, packed=True)
    return by_rule(case) == "native" and not reasons_against(case)


def no_packed_gradients() -> RuntimeError:
    """Return the error for a backward pass through a layer with packed weights."""
    return RuntimeError(
        "a layer with packed weights has no gradients: to compute gradients, use the original "
        "model, which is not optimized for inference"
    )
