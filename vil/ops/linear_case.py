"""Decide whether compiled C++ code or PyTorch computes linear layers and MLPs on a CPU.

Shapes: (..., C) has any number of leading dimensions, and C channels.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.dispatch import CHOICES
from vil.ops.native import library
from vil.utils.transforms import is_exporting, is_transformed

CHANNELS_UNIT = 16  # the C++ code needs numbers of channels that are multiples of this
LINEAR, NORM_LINEAR, LINEAR_RESIDUAL = "linear", "norm linear", "linear residual"
MLP = "mlp"
NAMES = {  # {kind of call: its name in logs}
    LINEAR: "linear layer",
    NORM_LINEAR: "norm and linear layer",
    LINEAR_RESIDUAL: "linear layer and residual",
    "norm linear residual": "norm, linear layer and residual",
    MLP: "norm and MLP",
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
    """Return the backend for a case: "native" if tuning found it fastest and it can run, else
    "torch"."""
    if CHOICES.get(case.bucket()) != "native" or case.unsupported() or library.prepare():
        return "torch"
    return "native"


def is_native(kind: str, x: Tensor, features: int, *weights: Tensor | None) -> bool:
    """Return whether the C++ backend should compute a linear layer or an MLP of x (..., C).

    kind, features: as in `LinearCase`. weights: the parameters of the layers. Returns False under
    torch.compile, which fuses PyTorch's operators itself.
    """
    if not CHOICES or not x.is_cpu or x.dtype not in library.DTYPES:
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


def is_tuned_native(kind: str, dim: int, features: int, dtype: torch.dtype) -> bool:
    """Return whether the C++ backend can run a layer and was fastest for at least one token count.

    Only the timings without autograd count. If the layer was tuned with packed weights, only the
    timings with packed weights count. The arguments are as in `LinearCase`.
    """
    case = LinearCase(kind, 1, dim, features, dtype, needs_grad=False)
    for packed in (True, False):
        sizes, _, rest = replace(case, packed=packed).bucket().partition(" 1 tokens")
        names = {
            name
            for bucket, name in CHOICES.items()
            if bucket.startswith(sizes) and bucket.endswith(rest)
        }
        if names:
            return "native" in names and not (case.unsupported() or library.prepare())
    return False
