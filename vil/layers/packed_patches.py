"""The patch embedding of a stage for CPU inference, computed by compiled code.

Shapes: B batch, c input channels, H W input size, L local tokens, G global tokens, C channels.
"""

import operator

from torch import Tensor, nn

from vil.layers.linear import has_hooks, has_plain_type
from vil.layers.packed_linear import Packed
from vil.layers.padding import Grid
from vil.layers.patch_embed import PatchEmbed
from vil.ops.linear import Norm
from vil.ops.native import library
from vil.ops.patch_embed import can_pack_patches, embed_patches, pack_patches

IMAGE_CHANNELS = 4  # inputs with more channels are maps, which are in the channels-last format
PARTS = ("proj", "norm_embed", "position", "drop")


class PackedPatchEmbed(Packed):
    """The parameters of a `PatchEmbed` for inference, with packed weights. They have no gradients.

    embed: the patch embedding, for which `can_pack_embed` is true, in float32 or bfloat16.
    """

    unpickled = ("packed", "last")

    def __init__(self, embed: PatchEmbed) -> None:
        super().__init__()
        conv, norm = embed.proj, embed.norm_embed
        self.weight = conv.weight.detach()
        self.bias = None if conv.bias is None else conv.bias.detach()
        self.norm = None
        if isinstance(norm, nn.LayerNorm):
            self.norm = Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)
        self.pack()

    def pack(self) -> None:
        """Pack the weights if the compiled C++ code can run on this machine."""
        self.packed, self.last = None, (None, (), None)
        if library.is_ready(self.weight.dtype):
            is_map = self.weight.shape[1] > IMAGE_CHANNELS
            self.packed = pack_patches(self.weight, self.bias, self.norm, adjacent_channels=is_map)

    def can_run(self, x: Tensor, embed: PatchEmbed) -> bool:
        """Return whether the compiled code can compute a call of `embed` for x (B, c, H, W)."""
        if self.packed is None or self.is_traced(x) or not x.is_cpu:
            return False
        if x.dtype != self.weight.dtype or x.shape[1] != self.weight.shape[1]:
            return False
        return not any(map(has_hooks, _parts(embed)))

    def forward(self, x: Tensor, embed: PatchEmbed, grid: Grid) -> Tensor:
        """Return the G global tokens and the L patch tokens (B, G+L, C) of x (B, c, H, W).

        grid: rows and columns of patches.
        """
        return embed_patches(x, self.packed, self.added(embed, grid), embed.num_global)

    def added(self, embed: PatchEmbed, grid: Grid) -> Tensor:
        """Return a tensor (G+L, C) float32, to which the patches of an image are added.

        It has the G global tokens with their position embeddings, then the position embeddings of L
        local tokens, which are 0 if the model has none. The result is cached, and not updated if
        parameters are changed in place.
        """
        last_grid, last_parameters, tokens = self.last
        parameters = tuple(embed.parameters())  # `set_input_size` replaces some of them
        same = len(parameters) == len(last_parameters)
        same = same and all(map(operator.is_, parameters, last_parameters))
        if not (same and grid == last_grid):
            tokens = self.weight.new_zeros(embed.num_global + grid[0] * grid[1], len(self.weight))
            tokens = tokens.float()
            if embed.cls_token is not None:
                tokens[: embed.num_global] = embed.cls_token[0]
            if embed.position is not None:
                tokens += embed.position(grid)[0]
            self.last = grid, parameters, tokens
        return tokens


def can_pack_embed(embed: nn.Module) -> bool:
    """Return whether a `PackedPatchEmbed` can compute the same tokens as the patch embedding."""
    if type(embed) is not PatchEmbed or any(map(has_hooks, _parts(embed))):
        return False
    norm, conv = embed.norm_embed, embed.proj
    if type(norm) not in (nn.LayerNorm, nn.Identity) or type(conv) is not nn.Conv2d:
        return False
    tensors = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
    if type(norm) is nn.LayerNorm:
        tensors += [norm.weight, norm.bias]
    side = (embed.patch, embed.patch)
    plain = conv.kernel_size == conv.stride == side and conv.groups == 1
    plain = plain and conv.padding == (0, 0) and conv.dilation == (1, 1)
    return plain and all(map(has_plain_type, tensors)) and can_pack_patches(conv.weight)


def _parts(embed: PatchEmbed) -> list[nn.Module]:
    modules = (getattr(embed, name) for name in PARTS)
    return [module for module in modules if module is not None]
