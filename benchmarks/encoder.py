"""Compare vil's transformer blocks with torch.nn.TransformerEncoderLayer and timm's block.

  python benchmarks/encoder.py        writes benchmarks/results/encoder-cpu/encoder.{json,md,png}
  python benchmarks/encoder.py --widths 64 --grids 7 --rounds 3 --out runs/encoder      a short run

Measures the time of a forward pass in inference, the time of a forward and backward pass in
training, and the peak memory of both, for several widths and square grids. The blocks of one width
and grid are timed in interleaved rounds, and the results are medians. Every block is pre-norm with
32 channels per head, an MLP of 4 times the width, exact GELU, no dropout and no relative bias, in
float32. A grid has one global token.

`full`, `torch` and `timm` compute the same function of the same weights. The script checks that
their outputs, parameters and multiply-accumulates are equal. torch's layer has a fast path for
inference. `torch fast` uses this path, and `torch` does not. Memory is the peak of the tensors that
a pass allocates, including the gradients of the parameters.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import timm
import torch
from matplotlib.figure import Figure
from shared import CPU, MIB, RESULTS, make_parser, time_in_turns, write_json
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vil.layers.attention import ATTENTIONS, build_attention
from vil.layers.block import Block
from vil.report.benchmark_plots import format_axes
from vil.utils.machine import machine
from vil.utils.timing import peak_tensor_bytes

WIDTHS, GRIDS, BATCH, ROUNDS = (64, 128, 256), (14, 28, 56), 2, 9
HEAD_DIM, NUM_GLOBAL, EPS, MILLI = 32, 1, 1e-6, 1e3
# {argument that sets the size of an attention: function of the grid's side that returns its value}
SIZES: dict[str, Callable[[int], int]] = {
    "window": lambda side: 7,
    "chunk": lambda side: 7,
    "num_features": lambda side: 64,
    "ratio": lambda side: max(side // 7, 1),
}
SAME = ("full", "torch", "torch fast", "timm")  # blocks that compute the same function
FAST = "aten::_transformer_encoder_layer_fwd"
TOLERANCE = 1e-4  # largest allowed difference of outputs, relative to the largest output


@dataclass
class Row:
    """Measurements of one block. Times are medians in ms, memory is in MiB, MACs per image."""

    width: int
    grid: int
    block: str
    parameters: int
    macs: int
    forward_ms: float | None = None
    training_ms: float | None = None  # None for `torch fast`, which is `torch` in training
    forward_mib: float | None = None
    training_mib: float | None = None


class Ours(nn.Module):
    """A block of this package with the attention `name` on a square grid."""

    def __init__(self, name: str, width: int, side: int):
        super().__init__()
        feature = ATTENTIONS.entry(name).facts.get("feature")
        own = {feature: SIZES[feature](side)} if feature else {}
        self.grid = (side, side)
        common = dict(dim=width, num_heads=width // HEAD_DIM, num_global=NUM_GLOBAL, grid=self.grid)
        self.block = Block(build_attention(name, **common, **own), norm_eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.grid)


def build_blocks(width: int, side: int, attentions: list[str]) -> dict[str, nn.Module]:
    """Build the blocks for a width and the side of a grid. Returns {name: block}. The blocks in
    SAME have the same weights."""
    torch.manual_seed(0)
    heads = width // HEAD_DIM
    blocks = {name: Ours(name, width, side) for name in attentions}
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, "gelu", layer_norm_eps=EPS, batch_first=True, norm_first=True
    )
    theirs = TimmBlock(width, heads, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=EPS))
    copy_weights(layer, theirs)
    blocks |= {"torch": layer, "torch fast": layer, "timm": theirs}
    if "full" in blocks:
        blocks["full"].block.load_state_dict(theirs.state_dict())
    return blocks


def copy_weights(layer: nn.TransformerEncoderLayer, block: TimmBlock) -> None:
    """Copy the weights of torch's layer to timm's block."""
    attn, mlp = block.attn, block.mlp
    pairs = [(attn.proj, layer.self_attn.out_proj), (mlp.fc1, layer.linear1)]
    pairs += [(mlp.fc2, layer.linear2), (block.norm1, layer.norm1), (block.norm2, layer.norm2)]
    for target, source in pairs:
        target.load_state_dict(source.state_dict())
    attn.qkv.weight.data.copy_(layer.self_attn.in_proj_weight)
    attn.qkv.bias.data.copy_(layer.self_attn.in_proj_bias)


def infer(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in inference. torch's fast path is on for `torch fast` only."""
    torch.backends.mha.set_fastpath_enabled(name == "torch fast")
    block.eval()
    try:
        with torch.inference_mode():
            return block(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def train(block: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward pass, with gradients of all parameters and the input."""
    block.train().zero_grad()
    block(x.detach().requires_grad_()).sum().backward()


def count_macs(name: str, block: nn.Module, x: Tensor) -> int:
    """Return the multiply-accumulates of one image."""
    if isinstance(block, Ours):
        return block.block.macs(block.grid)
    block.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.backends.mha.set_fastpath_enabled(False)
        block(x[:1])
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() // 2


def check_same(blocks: dict[str, nn.Module], x: Tensor, rows: dict[str, Row]) -> None:
    """Exit unless the blocks in SAME have equal outputs, parameters and MACs, and only `torch fast`
    runs torch's fast path. x: input. rows: rows of the blocks, by name."""
    wanted = infer("torch", blocks["torch"], x)
    for name in (name for name in SAME if name in blocks):
        far = (infer(name, blocks[name], x) - wanted).abs().max() / wanted.abs().max()
        if not far <= TOLERANCE:
            raise SystemExit(f"{name} differs from torch by {far:.1e} of the largest output")
        for field in ("parameters", "macs"):
            values = [getattr(rows[each], field) for each in (name, "torch")]
            if values[0] != values[1]:
                raise SystemExit(f"{name} has {values[0]} {field}, but torch has {values[1]}")
        with torch.profiler.profile() as record:
            infer(name, blocks[name], x)
        if (FAST in {event.key for event in record.key_averages()}) != (name == "torch fast"):
            raise SystemExit(f"{name}: {FAST} {'ran' if name != 'torch fast' else 'did not run'}")


def measure_case(width: int, side: int, args: argparse.Namespace) -> list[Row]:
    """Measure all blocks at one width and grid."""
    blocks = build_blocks(width, side, args.attentions)
    x = torch.randn(args.batch, side * side + NUM_GLOBAL, width)
    rows = {}
    for name, block in blocks.items():
        parameters = sum(p.numel() for p in block.parameters())
        rows[name] = Row(width, side, name, parameters, count_macs(name, block, x))
    check_same(blocks, x, rows)
    passes: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {n: lambda n=n, b=b: infer(n, b, x) for n, b in blocks.items()},
        "training": {n: lambda b=b: train(b, x) for n, b in blocks.items() if n != "torch fast"},
    }
    for kind, functions in passes.items():
        for name, seconds in time_in_turns(functions, args.rounds, CPU).items():
            setattr(rows[name], f"{kind}_ms", statistics.median(seconds) * MILLI)
            mib = peak_tensor_bytes(functions[name], CPU) / MIB
            setattr(rows[name], f"{kind}_mib", mib)
    return list(rows.values())


def format_table(rows: list[Row], about: dict) -> str:
    """Return the results as Markdown."""
    heads = ("width", "grid", "block", "parameters", "MACs (M)", "forward (ms)",
             "forward + backward (ms)", "forward (MiB)", "forward + backward (MiB)")  # fmt: skip
    lines = [about["title"], "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        values = (row.forward_ms, row.training_ms, row.forward_mib, row.training_mib)
        cells = [row.width, f"{row.grid}x{row.grid}", row.block, row.parameters]
        cells += [f"{row.macs / 1e6:.1f}", *("" if v is None else f"{v:.1f}" for v in values)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


PANELS = {
    "forward_ms": "forward (ms)",
    "training_ms": "forward + backward (ms)",
    "training_mib": "peak memory of both (MiB)",
}
COLORS = ("#0072B2", "#4D4D4D", "#E69F00", "#CC79A7", "#56B4E9", "#8C6D31")  # ours, in order
THEIRS = {"torch": ("#D55E00", "--"), "torch fast": ("#A50F15", "--"), "timm": ("#009E73", "--")}


def plot(rows: list[Row], about: dict, file: Path) -> None:
    """Plot times and memory against the number of tokens, with a row of panels per width."""
    widths, names = (list(dict.fromkeys(v)) for v in zip(*((r.width, r.block) for r in rows)))
    styles = dict(zip([n for n in names if n not in THEIRS], [(c, "-") for c in COLORS])) | THEIRS
    figure = Figure(figsize=(10.5, 1.3 + 2.8 * len(widths)), layout="constrained")
    panels = figure.subplots(len(widths), len(PANELS), squeeze=False, sharex=True)
    for width, line in zip(widths, panels):
        for axes, (field, label) in zip(line, PANELS.items()):
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
            axes.set_title(f"width {width}", loc="left", fontsize=9)
            for name in names:
                points = [r for r in rows if (r.width, r.block) == (width, name)]
                points = [(r.grid**2, getattr(r, field)) for r in points if getattr(r, field)]
                color, dashes = styles.get(name, ("#7570B3", "-"))
                look = dict(color=color, linestyle=dashes, marker="o", markersize=3.5)
                axes.plot(*zip(*points), label=name, **look) if points else None
            format_axes(axes, {r.grid**2: f"{r.grid}×{r.grid}" for r in rows})
    figure.suptitle(about["title"], fontsize=10)
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    figure.savefig(file, dpi=150)


def run(args: argparse.Namespace) -> None:
    about = machine(CPU) | {"timm": timm.__version__, "batch": args.batch, "rounds": args.rounds}
    about["title"] = (
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}, "
        f"timm {timm.__version__}, batch {args.batch}, float32, {args.rounds} rounds"
    )
    rows = []
    for width in args.widths:
        for side in args.grids:
            rows += measure_case(width, side, args)
            print(f"width {width}, {side} x {side} tokens done", flush=True)
    table = format_table(rows, about)
    print(f"\n{table}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "encoder.md").write_text(table)
    plot(rows, about, args.out / "encoder.png")
    write_json(args.out / "encoder.json", {"machine": about, "rows": [asdict(r) for r in rows]})


def check_arguments(args: argparse.Namespace) -> None:
    """End the script with an error message if an argument has an invalid value."""
    if odd := [width for width in args.widths if width <= 0 or width % (2 * HEAD_DIM)]:
        # torch's fast path needs an even number of heads
        raise SystemExit(f"--widths must be multiples of {2 * HEAD_DIM}, got {odd[0]}")
    if small := [side for side in args.grids if side < 1]:
        raise SystemExit(f"--grids must be at least 1, got {small[0]}")
    for name in args.attentions:
        if name not in ATTENTIONS:
            raise SystemExit(f"--attentions must be among {', '.join(ATTENTIONS)}; got {name}")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="numbers of channels")
    parser.add_argument("--grids", type=int, nargs="+", default=GRIDS, help="grid sides in tokens")
    parser.add_argument("--attentions", nargs="+", default=list(ATTENTIONS), metavar="NAME")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images ({BATCH})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed passes ({ROUNDS})")
    parser.add_argument("--out", type=Path, default=RESULTS / "encoder-cpu", help="output folder")
    args = parser.parse_args()
    check_arguments(args)
    run(args)
