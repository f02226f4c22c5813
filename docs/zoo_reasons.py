"""Why some counts of MODEL_ZOO.md differ from the published ones: the words and the arithmetic.

One function per reason, from all rows to a piece of the page. Figures are computed here from the
configs' models, and where the reason is known the published figure is met or an assertion fails.
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
**Windows at 384 px.** The configs have the windows of the published evaluation, the published MACs
are those of windows of 7 in all stages. Each of n blocks of width C on L tokens scores 9·f² keys
and adds up as many values, which is `2·n·L·C·9·(f² - 7²)` more than with f = 7.
"""
TABLES = """\
**Bias tables.** The parameters published for relative bias are those of the same model with
absolute position.
"""
BUFFERS = """\
**Performer.** The published parameters include the random projections, which are buffers.
"""
PRODUCTS = """\
A block of T = G + L tokens, width C, N heads and f features needs 4·T·C² for q, k, v and the
output; four products of T·f·C (features of q, features of k, keys with values, queries with these)
and T·f·N for the denominator; 8·T·C² for the MLP.
"""
SIX_PRODUCTS = """\
Six products of T·f·C in a block instead of four give the published MACs. Which two more were
counted is not published.
"""
GLOBAL = """\
**Global.** A block of T = G + L tokens and width C needs 4·T·C² for q, k, v and the output; 2·G·T·C
for the global rows, which see everything, and 2·L·G·C for the local rows, which see the global
tokens; 8·T·C² for the MLP.
"""
GLOBAL_OPEN = """\
Published are {published}G, {more} more; what these are is not published. (The original computes
keys and values once more for the global rows, 2·T·C²; counting them would give {twice}.)

Partial global: the published command has `l4,h6,d384`, which gives {command}; `l4,h12,d768`
as in ViL-Small gives {wide}. Published are {row.parameters}M and {row.macs}G, which
neither has: the `config.yaml` beside the weights must say what shape they have.
"""


def windows(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "windows"):
        terms = dict(wider(stage) for stage in ours.stages if is_wider(stage))
        rest = ours.macs - sum(terms.values())
        assert macs_agree(row, rest), row
        shown = "; ".join(f"`{term}` = {giga(macs)}" for term, macs in terms.items())
        lines.append((row.model, giga(ours.macs), shown, giga(rest), f"{row.macs}G"))
    header = ("model", "counted", "of it for other windows", "windows of 7", "published")
    return f"{WINDOWS}\n{table(header, lines)}"


def is_wider(stage: StageCount) -> bool:
    return "longformer" in stage.spec.attention and stage.spec.attn_size != PUBLISHED_WINDOW


def wider(stage: StageCount) -> tuple[str, int]:
    """What the stage's window costs beyond the published one: the arithmetic and its result."""
    n, f, width = len(stage.spec.attention), stage.spec.attn_size, stage.spec.dim
    length = stage.grid[0] * stage.grid[1]
    macs = 2 * n * length * width * 9 * (f**2 - PUBLISHED_WINDOW**2)
    return f"2·{n}·{length}·{width}·9·({f}² - {PUBLISHED_WINDOW}²)", macs


def tables(rows: Sequence[Row]) -> str:
    lines = []
    for row, ours in with_reason(rows, "tables"):
        plain = count(row.config.replace("_rpb", "")).parameters
        assert f"{plain / 1e6:.1f}" == row.parameters, row
        figures = (f"{row.parameters}M", mega(plain), mega(ours.parameters))
        lines.append((row.model, str(ours.side), *figures))
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
    sums = ("model", "counted", "T·f·C, all blocks", "counted + two of them", "published")
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
    """T·f·C of the stage's blocks with performer attention."""
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
        command=figures(command),
        wide=figures(wide),
        row=partial,
    )
    return "\n".join((GLOBAL, per_stage(full), text))


def figures(ours: Counted) -> str:
    return f"{mega(ours.parameters)} and {giga(ours.macs)}"


def per_stage(row: Row) -> str:
    """What `MsViT.macs` counts, split into its terms, one line per stage."""
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
    """4·T·C² of all blocks: q, k, v and the output."""
    return 4 * len(stage.spec.attention) * tokens(stage) * stage.spec.dim**2


def millions(macs: int) -> str:
    return f"{macs / 1e6:,.1f}"


REASONS = {
    "windows": windows,
    "tables": tables,
    "performer": performer,
    "global": global_memory,
}
