"""Position embeddings: absolute embeddings, relative position tables, and resizing of both.

Parameters have the same names as in the original Vision Longformer code (2021).

Shapes: B batch, X Y grid, L = X*Y local tokens, G global tokens, C channels, N heads.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from vil.layers.padding import Grid

RESIZES = ("interpolate", "crop")
# interpolation of positions by rule; "linear" is the rule of the original 2021 code
LINEAR = dict(mode="bilinear", align_corners=False)
RULES = {
    "linear": LINEAR,
    "bicubic": dict(mode="bicubic", align_corners=False, antialias=True),
    "extend": LINEAR,  # relative position tables are not interpolated, see resize_table
}
STD = 0.02


def small_normal(*shape: int) -> nn.Parameter:
    """Return a parameter of this shape, initialized from a truncated normal with std 0.02."""
    return nn.Parameter(trunc_normal_(torch.empty(shape), std=STD))


def same_size(new: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Return whether two sizes are equal; False if `new` has a symbolic dimension.

    If a symbolic dimension were compared, torch.export would record the constraint new != old, and
    the exported program would reject inputs of the old size.
    """
    return not any(isinstance(n, torch.SymInt) for n in new) and tuple(new) == tuple(old)


def square_side(area: int) -> int:
    """Return the side of a square with this area; 0 if the area is not a square number."""
    side = math.isqrt(max(area, 0))
    return side if side * side == area else 0


def resize_line(x: Tensor, length: int, rule: str = "linear") -> Tensor:
    """Interpolate embeddings of n positions, (1, n, C), to `length` positions, (1, length, C).

    rule: the interpolation, a key of RULES.
    """
    return F.interpolate(x.mT[:, :, None], size=(1, length), **RULES[rule])[:, :, 0].mT


def resize_table(table: Tensor, old: Grid, new: Grid, rule: str = "linear") -> Tensor:
    """Resize a table (old rows * old columns, N) to (new rows * new columns, N).

    rule: a key of RULES. "linear" and "bicubic" interpolate the table as an image. "extend" is for
    relative position tables, in which displacement 0 is in the center. It keeps the entry of each
    displacement, and repeats the outermost entries for larger ones.
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
    table: Tensor, old: Grid, new: Grid, sizes: Tensor, *, centered: bool = False
) -> Tensor:
    """Resize a table (old rows * old columns, N) to a different size for each of B images.

    sizes (B, 2): rows and columns for each image, at most `new`. Returns (B, new rows * new
    columns, N), with each resized table at the top left or, if `centered`, in the center. The other
    entries are undefined. Does not synchronize with the device.
    """
    sizes = sizes.to(torch.promote_types(table.dtype, torch.float32))  # half is too coarse
    rows, cols = (interp_matrix(sizes[:, i], old[i], new[i], centered).to(table) for i in (0, 1))
    tables = torch.einsum("bxr,rcn,byc->bxyn", rows, table.unflatten(0, old), cols)
    return tables.flatten(1, 2)


def interp_matrix(lengths: Tensor, old: int, new: int, centered: bool) -> Tensor:
    """Return matrices (B, new, old). Matrix i interpolates `old` points to lengths[i] points.

    The interpolation is linear. Only lengths[i] rows of matrix i are defined: the first rows or, if
    `centered`, the middle rows. lengths (B,): at most `new` each, in the dtype of the matrices.
    """
    lengths = lengths[:, None]
    index = torch.arange(new, device=lengths.device)
    index = index - (new - lengths) // 2 if centered else index
    source = ((index + 0.5) * (old / lengths) - 0.5).clamp(0, old - 1)
    points = torch.arange(old, device=lengths.device)
    return (1 - (source[..., None] - points).abs()).clamp(min=0)


class AbsoluteEmbedding(nn.Module):
    """Absolute position embedding of local and global tokens.

    The embedding of a local token concatenates the embeddings of its row and its column.

    dim: number of channels, which must be even.
    grid: rows and columns that the embeddings are sized for.
    resize: what the forward pass does on another grid. "interpolate" interpolates the row and
    column embeddings. "crop" keeps the first ones, as the original Vision Longformer code for
    detection does, and raises ValueError for a larger grid.
    """

    def __init__(
        self, dim: int, grid: Grid, num_global: int, *, resize: str = "interpolate"
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"an absolute position embedding needs an even dim, got {dim}")
        if resize not in RESIZES:
            raise ValueError(f"resize must be one of {', '.join(RESIZES)}, got {resize!r}")
        self.resize = resize
        if num_global:
            self.cls_pos_embed = small_normal(1, num_global, dim)
        else:  # checkpoints of the original 2021 code have this entry, without elements
            self.register_buffer("cls_pos_embed", torch.zeros(1, 0, dim))
        self.x_pos_embed = small_normal(1, grid[0], dim // 2)
        self.y_pos_embed = small_normal(1, grid[1], dim // 2)

    def forward(self, grid: Grid) -> Tensor:
        """Return the embeddings (1, G+L, C) for a grid, global tokens first."""
        rows, cols = self.fit(self.x_pos_embed, grid[0]), self.fit(self.y_pos_embed, grid[1])
        local = torch.cat(
            [
                rows[:, :, None].expand(-1, -1, grid[1], -1),
                cols[:, None].expand(-1, grid[0], -1, -1),
            ],
            dim=-1,
        )
        return torch.cat([self.cls_pos_embed, local.flatten(1, 2)], dim=1)

    @property
    def param_grid(self) -> Grid:
        """The grid that the embeddings are sized for."""
        return self.x_pos_embed.shape[1], self.y_pos_embed.shape[1]

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the embeddings to another grid, by interpolation or cropping, see `fit`.

        rule: the interpolation, a key of RULES.
        """
        for leaf, length in zip(("x_pos_embed", "y_pos_embed"), grid):
            replace_parameter(self, leaf, self.fit(getattr(self, leaf), length, rule))

    def fit(self, line: Tensor, length: int, rule: str = "linear") -> Tensor:
        """Resize row or column embeddings (1, n, channels) to (1, length, channels).

        The attribute `resize` selects interpolation or cropping. rule: the interpolation, a key of
        RULES. Raises ValueError if `resize` is "crop" and `length` is larger than n.
        """
        if same_size((length,), (line.shape[1],)):
            return line
        if self.resize == "interpolate":
            return resize_line(line, length, rule)
        if length > line.shape[1]:
            raise ValueError(
                f"cannot crop {line.shape[1]} position embeddings to a grid side of {length}: "
                'build the model for larger images, or with resize="interpolate" '
                "(MODEL.VIT.POS_RESIZE)"
            )
        return line[:, :length]

    def resize_weight(
        self, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
    ) -> Tensor | None:
        """Return a checkpoint's embedding resized to fit a parameter; None if that is impossible.

        leaf, shape: name and shape of the parameter in this module. value: the checkpoint's
        embedding. rule: the interpolation, a key of RULES.
        """
        is_line = leaf in ("x_pos_embed", "y_pos_embed")
        if not is_line or value.ndim != 3 or value.shape[2] != shape[2]:
            return None
        too_short = self.resize == "crop" and shape[1] > value.shape[1]
        return None if too_short else self.fit(value.double(), shape[1], rule)

    def extra_repr(self) -> str:
        rows, cols = self.param_grid
        return f"grid=({rows}, {cols}), resize={self.resize}"


def replace_parameter(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Set the parameter named `leaf` of a module to a value that may have another shape.

    dtype and requires_grad do not change.
    """
    old = getattr(module, leaf)
    new = nn.Parameter(value.detach().to(old.dtype).clone(), requires_grad=old.requires_grad)
    module.register_parameter(leaf, new)


def register_relative_bias(module: nn.Module, table: Grid | None) -> None:
    """Register the relative position bias of an attention module with N heads and G global tokens.

    table: (rows, columns) of the bias table of local tokens; None for no table. It is stored as
    `module.table_size`.

    Registers this parameter unless `table` is None:
    local_relative_position_bias_table (rows * columns, N): pairs of local tokens.

    Registers these parameters if G > 0:
    g2g_relative_position_bias (N, G, G): pairs of global tokens.
    g2l_relative_position_bias (2, N, G): index 0 is for global queries with local keys, index 1 for
    local queries with global keys.
    """
    num_heads, num_global = module.num_heads, module.num_global
    module.table_size = table
    if table is not None:
        module.local_relative_position_bias_table = small_normal(table[0] * table[1], num_heads)
    if num_global:
        module.g2l_relative_position_bias = small_normal(2, num_heads, num_global)
        module.g2g_relative_position_bias = small_normal(num_heads, num_global, num_global)


def dense_bias(table: Tensor, grid: Grid) -> Tensor:
    """Expand a relative position table to the bias of all query-key pairs of a grid (X, Y).

    table ((2X-1)*(2Y-1), heads). Returns (heads, X*Y, X*Y). The bias of a pair is the table's entry
    for the query's position minus the key's position.
    """
    image = table.mT.unflatten(1, (2 * grid[0] - 1, 2 * grid[1] - 1))  # (N, 2X-1, 2Y-1)
    for axis, size in enumerate(grid, start=1):
        line = torch.arange(size, device=table.device)
        index = line[:, None] - line + size - 1  # table index of (query, key) along this axis
        image = image.index_select(2 * axis - 1, index.flatten()).unflatten(
            2 * axis - 1, (size, size)
        )
    return image.transpose(2, 3).flatten(3).flatten(1, 2)  # from (N, X, X, Y, Y)
