"""Where a token is: absolute embeddings, relative bias tables, and their resizing to other grids.

Letters: B images, X Y grid, L = X*Y local tokens, G global tokens, C channels, N heads, w window.
Parameter names are the 2021 reference's, so that its weights load by name.
"""

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

RESIZES = ("interpolate", "crop")
# how positions are interpolated: the reference's rule, and a sharper one
LINEAR = dict(mode="bilinear", align_corners=False)
RULES = {
    "linear": LINEAR,
    "bicubic": dict(mode="bicubic", align_corners=False, antialias=True),
    "extend": LINEAR,  # but for tables of relative positions, see resize_table
}
STD = 0.02


def small_normal(*shape: int) -> nn.Parameter:
    """A parameter drawn from a truncated normal of standard deviation 0.02."""
    return nn.Parameter(trunc_normal_(torch.empty(shape), std=STD))


def same_size(new: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Whether nothing need be resized.

    Sizes that torch.export left open are not compared, which would exclude the old one from what
    is exported; resizing to the same size changes nothing.
    """
    return not any(isinstance(n, torch.SymInt) for n in new) and tuple(new) == tuple(old)


def resize_line(x: Tensor, length: int, rule: str = "linear") -> Tensor:
    """(1, n, C) -> (1, length, C), by one of RULES."""
    return F.interpolate(x.mT[:, :, None], size=(1, length), **RULES[rule])[:, :, 0].mT


def resize_table(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], rule: str = "linear"
) -> Tensor:
    """(old rows * old columns, N) -> (new rows * new columns, N), by one of RULES.

    A table has an entry for each distance in tokens, 0 in the middle. linear and bicubic stretch
    it, so that the outermost distances stay the outermost; with extend each entry stays at its
    distance, and new distances get what the nearest known one has.
    """
    if rule == "extend":
        rows, cols = (
            (torch.arange(n, device=table.device) - (n - m) // 2).clamp(0, m - 1)
            for n, m in zip(new, old)
        )
        return table.unflatten(0, old)[rows][:, cols].flatten(0, 1)
    image = table.unflatten(0, old).permute(2, 0, 1)[None]
    image = F.interpolate(image, size=new, **RULES[rule])
    return image[0].permute(1, 2, 0).flatten(0, 1)


def resize_tables(
    table: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    sizes: Tensor,
    *,
    centred: bool = False,
) -> Tensor:
    """(old rows * old columns, N) -> (B, new rows * new columns, N): `resize_table` for each image,
    to its own sizes (B, 2), each in the first rows and columns of the new table or in its middle.

    What stands beyond them has no meaning. The sizes stay on the device.
    """
    rows, cols = (stretching(sizes[:, i], old[i], new[i], centred).to(table) for i in (0, 1))
    tables = torch.einsum("bxr,rcn,byc->bxyn", rows, table.unflatten(0, old), cols)
    return tables.flatten(1, 2)


def stretching(lengths: Tensor, old: int, new: int, centred: bool) -> Tensor:
    """(B,) -> (B, new, old): weights that stretch `old` points linearly, corners not aligned, to
    `lengths` of `new` points."""
    lengths = lengths[:, None]
    own = torch.arange(new, device=lengths.device)
    own = own - (new - lengths) // 2 if centred else own
    places = ((own + 0.5) * (old / lengths) - 0.5).clamp(0, old - 1)
    known = torch.arange(old, device=lengths.device)
    return (1 - (places[..., None] - known).abs()).clamp(min=0)


class AbsoluteEmbedding(nn.Module):
    """A row and a column embedding side by side for local tokens, one vector for each global token.

    resize: what happens on a grid of another size: "interpolate" the embeddings, or "crop" their
    first rows and columns (the reference's detection code; a grid larger than `grid` is then
    refused).
    """

    def __init__(
        self, dim: int, grid: tuple[int, int], num_global: int, *, resize: str = "interpolate"
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"an absolute embedding needs an even width, got {dim}")
        if resize not in RESIZES:
            raise ValueError(f"resize must be one of {', '.join(RESIZES)}, got {resize!r}")
        self.resize = resize
        if num_global:
            self.cls_pos_embed = small_normal(1, num_global, dim)
        else:  # the reference's files have it; without elements there is nothing to learn
            self.register_buffer("cls_pos_embed", torch.zeros(1, 0, dim))
        self.x_pos_embed = small_normal(1, grid[0], dim // 2)
        self.y_pos_embed = small_normal(1, grid[1], dim // 2)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """-> (1, G+L, C), global tokens first."""
        rows, cols = self.fit(self.x_pos_embed, grid[0]), self.fit(self.y_pos_embed, grid[1])
        local = torch.cat(
            [
                rows[:, :, None].expand(-1, -1, grid[1], -1),
                cols[:, None].expand(-1, grid[0], -1, -1),
            ],
            dim=-1,
        )
        return torch.cat([self.cls_pos_embed, local.flatten(1, 2)], dim=1)

    def set_grid(self, grid: tuple[int, int], rule: str = "linear") -> None:
        """Make the embeddings for another grid, for good."""
        for leaf, length in zip(("x_pos_embed", "y_pos_embed"), grid):
            replace_parameter(self, leaf, self.fit(getattr(self, leaf), length, rule))

    def fit(self, line: Tensor, length: int, rule: str = "linear") -> Tensor:
        """(1, n, C) -> (1, length, C): interpolated by one of RULES or cropped, as `resize` says.
        ValueError where there is too little to crop."""
        if same_size((length,), (line.shape[1],)):
            return line
        if self.resize == "interpolate":
            return resize_line(line, length, rule)
        if length > line.shape[1]:
            raise ValueError(
                f"a grid of {length} is larger than the {line.shape[1]} embeddings to crop"
            )
        return line[:, :length]

    def extra_repr(self) -> str:
        return (
            f"grid=({self.x_pos_embed.shape[1]}, {self.y_pos_embed.shape[1]}), resize={self.resize}"
        )


def replace_parameter(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Give a parameter another value and shape; whether it is trained stays."""
    old = getattr(module, leaf)
    new = nn.Parameter(value.detach().to(old.dtype).clone(), requires_grad=old.requires_grad)
    module.register_parameter(leaf, new)


def register_relative_bias(
    module: nn.Module, table: tuple[int, int] | None, heads: int, num_global: int
) -> None:
    """Give an attention module its bias parameters.

    local_relative_position_bias_table (rows*cols, N), unless `table` is None. With global tokens:
    g2l_relative_position_bias (2, N, G): [0] from global queries to local keys, [1] from local
    queries to global keys. g2g_relative_position_bias (N, G, G): among global tokens.
    """
    if table is not None:
        module.local_relative_position_bias_table = small_normal(table[0] * table[1], heads)
    if num_global:
        module.g2l_relative_position_bias = small_normal(2, heads, num_global)
        module.g2g_relative_position_bias = small_normal(heads, num_global, num_global)


def dense_bias(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """((2X-1)*(2Y-1), N) -> (N, L, L): the bias of each pair, by query minus key position."""
    image = table.mT.unflatten(1, (2 * grid[0] - 1, 2 * grid[1] - 1))  # (N, 2X-1, 2Y-1)
    for axis, size in enumerate(grid, start=1):
        line = torch.arange(size, device=table.device)
        index = line[:, None] - line + size - 1  # of query and key along this axis
        image = image.index_select(2 * axis - 1, index.flatten()).unflatten(
            2 * axis - 1, (size, size)
        )
    return image.transpose(2, 3).flatten(3).flatten(1, 2)  # from (N, X, X, Y, Y)
