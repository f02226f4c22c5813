"""Explain why some counts of MODEL_ZOO.md differ from the published ones, with the arithmetic.

Each reason is a function from all rows to a section. The numbers are computed from the configs'
models. If a reason is known, an assertion checks that it gives the published number.
"""

from collections.abc import Sequence

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
MACs are for windows of 7 in all stages. In each of n blocks of width C, L tokens attend to 9·f²
keys and values, which adds `2·n·L·C·9·(f² - 7²)` MACs compared with f = 7.
"""
TABLES = """\
**Bias tables.** The published parameters of models with relative bias are those of the same model
with absolute position.
"""
BUFFERS = """\
**Performer.** The published parameters include the random projections, which are buffers.
"""
PRODUCTS = """\
A block of T = G + L tokens, width C, N heads and f features needs 4·T·C² for q, k, v and the
output; four matmuls of T·f·C (features of q; features of k; keys with values; queries with the
result) and T·f·N for the denominator; 8·T·C² for the MLP.
"""
SIX_PRODUCTS = """\
Six matmuls of T·f·C per block, instead of four, give the published MACs. The authors do not state
which two they added.
"""
GLOBAL = """\
**Global.** A block of T = G + L tokens and width C needs 4·T·C² for q, k, v and the output; 2·G·T·C
for the global queries, which attend to all tokens, and 2·L·G·C for the local queries, which attend
to the global tokens; 8·T·C² for the MLP.
"""
GLOBAL_OPEN = """\
The published number is {published}G, which is {more} more; the authors do not state why. (The
original code computes keys and values a second time for the global queries, 2·T·C²; counting them
would give {twice}.)

Partial global: the published command has `l4,h6,d384`, which gives {command}; `l4,h12,d768`
as in ViL-Small gives {wide}. Neither gives the published {row.parameters}M and
{row.macs}G. The `config.yaml` beside the weights shows which ARCH was used.
"""


def windows(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "windows"):
        terms = dict(wider(stage) for stage in ours.stages if is_wider(stage))
        rest = ours.macs - sum(terms.values())
        assert macs_agree(row, rest), row
        shown = "; ".join(f"`{term}` = {giga(macs)}" for term, macs in terms.items())
        lines.append((row.model, giga(ours.macs), shown, giga(rest), f"{row.macs}G"))
    header = ("model", "counted", "due to other windows", "windows of 7", "published")
    return f"{WINDOWS}\n{table(header, lines)}"


def is_wider(stage: StageCount) -> bool:
    return "longformer" in stage.spec.attention and stage.spec.attn_size != PUBLISHED_WINDOW


def wider(stage: StageCount) -> tuple[str, int]:
    """Return the MACs that a stage's window adds to the published one: (formula, MACs)."""
    n, f, width = len(stage.spec.attention), stage.spec.attn_size, stage.spec.dim
    length = stage.grid[0] * stage.grid[1]
    macs = 2 * n * length * width * 9 * (f**2 - PUBLISHED_WINDOW**2)
    return f"2·{n}·{length}·{width}·9·({f}² - {PUBLISHED_WINDOW}²)", macs


def tables(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "tables"):
        plain = count(row.config.replace("_rpb", "")).parameters
        assert f"{plain / 1e6:.1f}" == row.parameters, row
        columns = (f"{row.parameters}M", mega(plain), mega(ours.parameters))
        lines.append((row.model, str(ours.side), *columns))
    header = ("model", "px", "published", "absolute position, counted", "relative bias, counted")
    return f"{TABLES}\n{table(header, lines)}"


def performer(rows: Sequence[Row]) -> str:
    parameters, products = [], []
    for row, ours in with_reason(rows, "performer"):
        buffers = sum(
            buffer.numel()
            for name, buffer in ours.model.named_buffers()
            if name.endswith("projection_matrix")
        )
        both = ours.parameters + buffers
        parts = f"{mega(ours.parameters)} + {buffers:,} = {mega(both)}"
        parameters.append((row.model, parts, f"{row.parameters}M"))
        one = sum(map(product_of_features, ours.stages))
        six = ours.macs + 2 * one
        assert f"{both / 1e6:.1f}" == row.parameters, row
        assert macs_agree(row, six), row
        products.append((row.model, giga(ours.macs), giga(one), giga(six), f"{row.macs}G"))
    first, _ = next(with_reason(rows, "performer"))
    sums = ("model", "counted", "T·f·C, all blocks", "counted + 2·T·f·C", "published")
    return "\n".join(
        (
            BUFFERS,
            table(("model", "parameters + projections", "published"), parameters),
            PRODUCTS,
            per_stage(first),
            SIX_PRODUCTS,
            table(sums, products),
        )
    )


def product_of_features(stage: StageCount) -> int:
    """Return T·f·C, summed over the stage's blocks with performer attention."""
    blocks = stage.spec.attention.count("performer")
    return blocks * tokens(stage) * stage.spec.attn_size * stage.spec.dim


def global_memory(rows: Sequence[Row]) -> str:
    (full, ours), (partial, command) = with_reason(rows, "global")
    arch = get_config(ROOT / "configs" / partial.config).MODEL.VIT.MSVIT.ARCH
    wide = count(
        partial.config, f"MODEL.VIT.MSVIT.ARCH={arch.replace('l4,h6,d384', 'l4,h12,d768')}"
    )
    again = sum(linears(stage) // 2 for stage in ours.stages)
    text = GLOBAL_OPEN.format(
        published=full.macs,
        more=giga(float(full.macs) * 1e9 - ours.macs),
        twice=giga(ours.macs + again),
        command=totals(command),
        wide=totals(wide),
        row=partial,
    )
    return "\n".join((GLOBAL, per_stage(full), text))


def totals(ours: Counted) -> str:
    return f"{mega(ours.parameters)} and {giga(ours.macs)}"


def per_stage(row: Row) -> str:
    """Return a table of the terms of `MsViT.macs`, one row per stage."""
    ours, lines = count(row.config), []
    for number, stage in enumerate(ours.stages, start=1):
        attention = sum(block.attn.macs(stage.grid) for block in stage.stage.blocks)
        terms = (stage.stage.embed.macs(stage.grid), linears(stage), attention - linears(stage))
        terms += (2 * linears(stage), stage.macs)
        assert sum(terms[:-1]) == stage.macs
        spec = stage.spec
        shape = (f"{stage.grid[0]}² + {spec.num_global} = {tokens(stage)}", str(spec.dim))
        lines.append((str(number), *shape, str(len(spec.attention)), *map(millions, terms)))
    lines.append(("head", *[""] * 7, millions(ours.head)))
    lines.append(("sum", *[""] * 7, millions(ours.macs)))
    header = ("stage", "T", "C", "blocks", "patches", "4·T·C²", "attention", "8·T·C²", "MACs (M)")
    return f"{row.model}:\n\n{table(header, lines)}"


def tokens(stage: StageCount) -> int:
    return stage.spec.num_global + stage.grid[0] * stage.grid[1]


def linears(stage: StageCount) -> int:
    """Return 4·T·C² of all blocks: q, k, v and the output."""
    return 4 * len(stage.spec.attention) * tokens(stage) * stage.spec.dim**2


def millions(macs: int) -> str:
    return f"{macs / 1e6:,.1f}"


REASONS = {
    "windows": windows,
    "tables": tables,
    "performer": performer,
    "global": global_memory,
}
