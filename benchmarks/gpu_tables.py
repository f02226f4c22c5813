"""Print the tables of a run of scripts/gpu_check.sh, and plot attention.

  python benchmarks/gpu_tables.py benchmarks/results/h200-2026-11-28

The folder holds rows.jsonl, lines of benchmarks/gpu.py. If it holds the lines of several runs, each
line has the number of its run. Writes attention.png there.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

DENSE = {True: "sdpa efficient_attention", False: "sdpa flash_attention"}  # {with a bias: kernel}
OTHERS = ("chunk_handgrad", "dense", "sdpa cudnn_attention")
MODES = {"eager": "eager", "default": "compiled"}


def read_rows(folder: Path, what: str) -> list[dict]:
    """Return the rows of one kind, without those of failures."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [row for row in rows if row["what"] == what and "error" not in row]


def case_of(row: dict) -> tuple:
    return tuple(row[key] for key in ("grid", "w", "batch", "heads", "dim", "bias"))


def attention_table(folder: Path) -> list[str]:
    """Return lines of Markdown: milliseconds of `triton`, and how many times longer others take."""
    times: dict[tuple, dict[str, dict]] = {}
    for row in read_rows(folder, "attention"):
        name = "dense" if row["backend"] == DENSE[row["bias"]] else row["backend"]
        times.setdefault(case_of(row), {})[name] = row
    alone = {
        case_of(row): sum(row["microseconds"].values()) / 1e3
        for row in read_rows(folder, "kernels")
    }
    lines = [
        "| tokens, window | batch, heads x channels | bias | ms | kernels | 2021 | torch | cuDNN |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in times.items():
        if "triton" not in found:
            continue
        (grid, w, batch, heads, dim, bias), ours = case, found["triton"]
        cells = [f"{grid} x {grid}, {w}", f"{batch}, {heads} x {dim}", "yes" if bias else "no"]
        cells += [f"{ours['forward_ms']:.2f}, {ours['both_ms']:.2f}"]
        cells += [f"{alone[case]:.2f}" if case in alone else ""]
        for name in OTHERS:
            ratios = (
                f"{found[name][key] / ours[key]:.1f}" if name in found else ""
                for key in ("forward_ms", "both_ms")
            )
            cells.append(", ".join(filter(None, ratios)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def model_table(folder: Path) -> list[str]:
    """Return lines of Markdown: images per second of the models, in each run, and memory."""
    rows = [row for row in read_rows(folder, "model") if row["batch"] > 1]
    speeds: dict[tuple, list[dict]] = {}
    for row in rows:
        key = row["model"], row["backend"], row["mode"], row["training"]
        speeds.setdefault(key, []).append(row)
    lines = [
        "| model | training, eager | compiled | evaluation, eager | compiled | GiB of training |",
        "|---|---|---|---|---|---|",
    ]
    for name, backend in dict.fromkeys((row["model"], row["backend"]) for row in rows):
        found = [
            speeds.get((name, backend, mode, training), [])
            for training in (True, False)
            for mode in MODES
        ]
        cells = [", ".join(f"{row['images_s']:.0f}" for row in runs) for runs in found]
        label = name.removeprefix("timm/") + (", 2021 chunks" if "chunk" in backend else "")
        memory = ", ".join(f"{row['peak_mib'] / 1024:.1f}" for row in found[0][:1])
        lines.append(f"| {' | '.join([label, *cells, memory])} |")
    return lines


def plot(folder: Path) -> None:
    """Draw the time per token against the side of the grid, for a window of 8 without bias."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    labels = {
        "triton": "triton", "chunk_handgrad": "2021 chunks", DENSE[False]: "dense, flash",
        "sdpa cudnn_attention": "dense, cuDNN",
    }  # fmt: skip
    rows = [row for row in read_rows(folder, "attention") if row["w"] == 8 and not row["bias"]]
    for name, label in labels.items():
        own = sorted((r for r in rows if r["backend"] == name), key=lambda r: r["grid"])
        sides = [row["grid"] for row in own]
        times = [1e6 * row["both_ms"] / (row["batch"] * row["grid"] ** 2) for row in own]
        axes.loglog(sides, times, "o-", label=label)
    axes.set(xlabel="side of the grid (tokens)", ylabel="forward and backward, ns per token")
    ticks = sorted({row["grid"] for row in rows})
    axes.set_xticks(ticks, [str(side) for side in ticks])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(folder / "attention.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(*attention_table(folder), "", *model_table(folder), sep="\n")
    plot(folder)


if __name__ == "__main__":
    main()
