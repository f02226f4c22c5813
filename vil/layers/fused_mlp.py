"""Compute a layer norm and an MLP as one operation, with compiled code where it is faster.

Shapes: B batch, T tokens, C channels.
"""

from timm.layers import Mlp
from torch import Tensor, nn

from vil.layers.linear import drops, has_hooks, has_plain_type
from vil.layers.packed_linear import PackedLinear, is_packed
from vil.ops.linear_case import MLP, is_native
from vil.ops.mlp import MlpWeights, norm_mlp

KINDS = dict(
    fc1=(nn.Linear, PackedLinear), act=(nn.GELU,), drop1=(nn.Dropout, nn.Identity),
    norm=(nn.Identity,), fc2=(nn.Linear, PackedLinear), drop2=(nn.Dropout, nn.Identity),
)  # fmt: skip


def apply_norm_mlp(norm: nn.Module, mlp: nn.Module, x: Tensor, *, residual: bool = False) -> Tensor:
    """Return mlp(norm(x)) for x (B, T, C), plus x itself if `residual`.

    Uses the compiled code if the MLP's weights are packed for it, or if it is selected.
    """
    if type(mlp) is Mlp:
        packed = is_packed(mlp.fc1, x)
        plain = type(mlp.fc1) is not PackedLinear
        native = packed or plain and is_native(MLP, x, getattr(mlp.fc1, "out_features", 0))
        if native and (weights := mlp_weights(norm, mlp)):
            return norm_mlp(x, weights, eps=norm.eps, residual=residual, packed=packed)
    y = mlp(norm(x))
    return x + y if residual else y


def mlp_weights(norm: nn.Module, mlp: nn.Module, training: bool | None = None) -> MlpWeights | None:
    """Return the parameters of a layer norm and an MLP with exact GELU.

    The weight matrices are packed if the linear layers are, see `vil.layers.packed_linear`. Returns
    None if the modules are not a layer norm and such an MLP, if they have hooks, if they apply
    dropout, or if their parameters are not plain tensors. training: see `drops`.
    """
    if type(norm) is not nn.LayerNorm or type(mlp) is not Mlp:
        return None
    layers = mlp._modules  # faster than attributes, and this function is called for each image
    if any(type(layers.get(name)) not in kinds for name, kinds in KINDS.items()):
        return None
    fc1, fc2 = layers["fc1"], layers["fc2"]
    packed = is_packed(fc1)
    if packed != is_packed(fc2) or (type(fc1) is PackedLinear and not packed):
        return None
    weights = [fc.packed if packed else fc.weight for fc in (fc1, fc2)]
    tensors = [norm.weight, norm.bias, weights[0], fc1.bias, weights[1], fc2.bias]
    modules = (norm, mlp, *layers.values())
    if any(map(has_hooks, modules)) or not all(map(has_plain_type, tensors)):
        return None
    if layers["act"].approximate != "none" or any(drops(module, training) for module in modules):
        return None
    return MlpWeights(*tensors)
