"""Write MODEL_ZOO.md: every published model with its published figures and our counts.

python docs/model_zoo.py            write the file
python docs/model_zoo.py --check    compare with it instead; exit code 1 where it differs

vil/pretrained/published.csv holds what was published and cannot be computed. Counts come from the
configs' models on the meta device (zoo_counts), reasons for differences from zoo_reasons, detectors
from zoo_detectors, measured figures from benchmarks/results.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from zoo_counts import (
    ROOT,
    TOLERANCE,
    Row,
    count,
    giga,
    macs_agree,
    mega,
    parameters_agree,
    table,
)
from zoo_detectors import section as detectors
from zoo_reasons import REASONS

from vil.pretrained.catalog import read_rows

PAGE, RESULTS = ROOT / "MODEL_ZOO.md", ROOT / "benchmarks/results"

HEAD = """\
# Model zoo

Every published ViL classifier and detector as a config. `python docs/model_zoo.py` writes this
page; do not edit it by hand.

- **published**: as the authors published it. Nobody measured it here.
- **counted**: parameters, and multiply-accumulates of one image (MACs; the authors say FLOPs),
  computed from the model that the config builds. Biases, norms and softmax are not in the MACs.
- **measured**: the outcome of a run of this code, with the command that prints it.

`vil.get_model(NAME, weights=MEMBER)` takes the weights that a row names, in Python and in timm:
[docs/guides/weights.md](docs/guides/weights.md). `vil_nano`, trained on the digits, is the model
whose weights ship with the package (`ViL_Nano_Weights.DIGITS`).

The host of the published weights is gone. `folder` is where they lay, so that who has a copy finds
them: `msvit/<folder>/model_best.pth`, with a `config.yaml` beside it. "22K" means pre-trained on
ImageNet-22K, a star that a count differs from the published figure
([why](#where-counts-and-published-figures-differ)).
"""
SECTIONS = {
    "absolute": "ImageNet-1K, absolute position",
    "relative": "ImageNet-1K, relative position bias",
    "attention": "ImageNet-1K, ViL-Small with other attentions, absolute position",
}
PRETRAINED = """\
## Weights of ImageNet-22K

Nothing but weights was published: no accuracy and no recipe. These configs have their shape, at
224 px and with 1000 classes.
"""
DIFFERENCES = f"""\
## Where counts and published figures differ

Parameters that do not round to the published figure, and MACs more than {TOLERANCE:.1%} off it.
"""
USE = """\
## Using the published weights

The configs here read the published weights, and so does the `config.yaml` that lies beside them.
Names are mapped, position tables are resized to the config's image and windows, and the command
says what became of every key. Without `MODEL.MODEL_PATH` nothing is evaluated.

```bash
vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH model_best.pth
vil evaluate --config-file their/config.yaml --data DIR MODEL.MODEL_PATH their/model_best.pth
```

Weights of ImageNet-22K have another head. Start it afresh (`FINETUNE.HEAD new`) or take the rows of
the 1000 classes, which the original took to be the first thousand:

```bash
seq 0 999 > rows.txt
scripts/finetune_384.sh imagenet/vil_medium_deep_384.yaml model_best.pth DIR runs/medium_384 \\
    FINETUNE.HEAD rows:rows.txt
```
"""
MEASURED = {
    "attentions": "Attentions on the digits in 42 epochs",
    "finetune": "Fine-tuning on the digits",
}


def page() -> str:
    """The whole text. Fails if a count differs without a reason, or agrees in spite of one."""
    rows = read_rows()
    for row in rows:
        agrees = parameters_agree(row) and macs_agree(row)
        assert agrees != bool(row.why), f"{row.config}: column why"
    named = {name: [row for row in rows if row.section == name] for name in (*SECTIONS, "22K")}
    parts = [HEAD]
    parts += [f"## {title}\n\n{results(named[name])}" for name, title in SECTIONS.items()]
    parts += [PRETRAINED, pretrained(named["22K"])]
    parts += [detectors()]
    parts += [DIFFERENCES, *[reason(rows) for reason in REASONS.values()]]
    parts += [USE, *measured(RESULTS)]
    return "\n".join(parts)


def results(rows: Iterable[Row]) -> str:
    header = (
        "model", "config", "px", "pre-trained", "top-1 published", "top-5 published",
        "parameters published", "counted", "MACs published", "counted", "weights", "folder",
    )  # fmt: skip
    lines = []
    for row in rows:
        ours = count(row.config)
        lines.append(
            (
                f"{row.model} \\*" if row.why else row.model,
                link(row.config),
                str(ours.side),
                "22K" if row.pretraining == "22K" else "",
                row.top1,
                row.top5,
                f"{row.parameters}M",
                mega(ours.parameters),
                f"{row.macs}G",
                giga(ours.macs),
                f"`{row.weights}`" if row.weights else "",
                f"`{row.folder}`",
            )
        )
    return table(header, lines)


def pretrained(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        ours, folder = count(row.config), f"`{row.folder}`"
        counts = mega(ours.parameters), giga(ours.macs)
        lines.append((row.model, link(row.config), *counts, f"`{row.weights}`", folder))
    header = ("model", "config", "parameters counted", "MACs counted", "weights", "folder")
    return table(header, lines)


def link(config: str) -> str:
    return f"[`{Path(config).name}`](configs/{config})"


def measured(folder: Path) -> list[str]:
    """A piece of the page per file of results, which names its machine, command and rows."""
    parts = []
    for kind, title in MEASURED.items():
        for path in sorted(folder.glob(f"{kind}-*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            sources = (f"`{found['command']}`", found.get("machine"), f"`{path.name}`")
            source = "; ".join(filter(None, sources))
            parts.append(f"## {title}, measured\n\n{source}\n\n{measured_table(found['rows'])}")
    return parts


def measured_table(rows: dict[str, dict | list]) -> str:
    """rows: {name: figures}; or {name: a curve of top-1 per seed}, whose ends are shown."""
    figures = {name: row if isinstance(row, dict) else ends(row) for name, row in rows.items()}
    names = list(dict.fromkeys(key for row in figures.values() for key in row))
    lines = [(name, *(shown(row.get(key, "")) for key in names)) for name, row in figures.items()]
    return table(("", *names), lines)


def ends(curves: Sequence[Sequence[float]]) -> dict[str, float | str]:
    last = [curve[-1] for curve in curves]
    each = ", ".join(f"{value:.2f}" for value in last)
    return {"top1, median": statistics.median(last), "each seed": each}


def shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    if not check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} is out of date: python docs/model_zoo.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
