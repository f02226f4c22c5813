"""Explain why some counts of MODEL_ZOO.md differ from the published ones, with the arithmetic.

Each reason is a function from all rows to a section. The numbers are computed from the configs'
models. If a reason is known, an assertion checks that it gives the published number.
"""

from collections.abc import Sequence
from pathlib import Path

from zoo_counts import (
    ROOT,
    Counted,
    Row,
    StageCount,
    count,
    giga,
    macs_agree,
    mega,
    table,
    with_reason,
)

from vil.config import get_config

PUBLISHED_WINDOW = 7

WINDOWS = """\
**Windows at 384 px.** The configs have the windows of the published evaluation, but the published
MACs are for windows of 7 in all stages.
"""
TABLES = """\
**Bias tables.** The published parameters of models with relative bias are those of the same model
with absolute position.
"""
PERFORMER = """\
**Performer.** The published parameters include the random projections, which are buffers. In a
block of T tokens, width C and f features, the published MACs are those of six matmuls of T·f·C
instead of four. The authors do not state which two they added.
"""
GLOBAL = """\
**Global.** The published {published}G are {more} more than counted; the authors do not state why.
For `global_partial`, the published command has `l4,h6,d384`, which gives {command}; `l4,h12,d768`
as in ViL-Small gives {wide}. Neither gives the published {row.parameters}M and
{row.macs}G. The `config.yaml` beside the weights shows which ARCH was used.
"""


def windows(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "windows"):
        rest = ours.macs - sum(map(due_to_window, ours.stages))
        assert macs_agree(row, rest), row
        lines.append((name_of(row), giga(ours.macs), giga(rest), f"{row.macs}G"))
    return f"{WINDOWS}\n{table(('config', 'counted', 'with windows of 7', 'published'), lines)}"


def due_to_window(stage: StageCount) -> int:
    """Return the MACs that a stage's window adds to the published one: in each block, L tokens
    attend to 9 f^2 keys and values of C channels."""
    if "longformer" not in stage.spec.attention:
        return 0
    pairs = 9 * (stage.spec.attn_size**2 - PUBLISHED_WINDOW**2) * stage.grid[0] * stage.grid[1]
    return 2 * len(stage.spec.attention) * stage.spec.dim * pairs


def tables(rows: Sequence[Row]) -> str:
    for row, _ in with_reason(rows, "tables"):
        plain = count(row.config.replace("_rpb", "")).parameters
        assert f"{plain / 1e6:.1f}" == row.parameters, row
    return TABLES


def performer(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "performer"):
        buffers = sum(
            buffer.numel()
            for name, buffer in ours.model.named_buffers()
            if name.endswith("projection_matrix")
        )
        both = ours.parameters + buffers
        six = ours.macs + 2 * sum(map(product_of_features, ours.stages))
        assert f"{both / 1e6:.1f}" == row.parameters, row
        assert macs_agree(row, six), row
        published = f"{row.parameters}M", f"{row.macs}G"
        lines.append((name_of(row), mega(both), published[0], giga(six), published[1]))
    header = ("config", "with projections", "published", "with six matmuls", "published")
    return f"{PERFORMER}\n{table(header, lines)}"


def product_of_features(stage: StageCount) -> int:
    """Return T·f·C, summed over the stage's blocks with performer attention."""
    blocks = stage.spec.attention.count("performer")
    tokens = stage.spec.num_global + stage.grid[0] * stage.grid[1]
    return blocks * tokens * stage.spec.attn_size * stage.spec.dim


def global_memory(rows: Sequence[Row]) -> str:
    (full, ours), (partial, command) = with_reason(rows, "global")
    arch = get_config(ROOT / "configs" / partial.config).MODEL.VIT.MSVIT.ARCH
    wide = count(
        partial.config, f"MODEL.VIT.MSVIT.ARCH={arch.replace('l4,h6,d384', 'l4,h12,d768')}"
    )
    return GLOBAL.format(
        published=full.macs,
        more=giga(float(full.macs) * 1e9 - ours.macs),
        command=totals(command),
        wide=totals(wide),
        row=partial,
    )


def totals(ours: Counted) -> str:
    return f"{mega(ours.parameters)} and {giga(ours.macs)}"


def name_of(row: Row) -> str:
    return f"`{Path(row.config).stem}`"


REASONS = {
    "windows": windows,
    "tables": tables,
    "performer": performer,
    "global": global_memory,
}
