"""Write MODEL_ZOO.md: every published model with its published numbers and our counts.

python docs/model_zoo.py            write the file
python docs/model_zoo.py --check    compare with the file instead; exit code 1 if it differs

vil/pretrained/published.csv has the published numbers that cannot be computed. zoo_counts counts
the configs' models on the meta device, zoo_reasons explains differences, and zoo_detectors has the
detectors. Measured results come from benchmarks/results.
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

- **published**: numbers published by the authors, which were not measured again here.
- **counted**: parameters and multiply-accumulates (MACs) of one image, computed from the model that
  the config builds. The authors call MACs FLOPs. Biases, norms and softmax are not included.
- **measured**: the result of a run of this code, with the command that prints it.

`vil.get_model(NAME, weights=MEMBER)` loads the weights in the column `weights`, also through timm:
see [weights](docs/guides/weights.md). The only weights that ship with the package are those of
`vil_nano`, trained on the digits (`ViL_Nano_Weights.DIGITS`).

The published weights are no longer online. `folder` is their folder in the authors' storage:
`msvit/<folder>/model_best.pth`, with a `config.yaml` beside it. "22K" means pre-trained on
ImageNet-22K. A star means that a count
[differs from the published number](#where-counts-and-published-numbers-differ).
"""
SECTIONS = {
    "absolute": "ImageNet-1K, absolute position",
    "relative": "ImageNet-1K, relative position bias",
    "attention": "ImageNet-1K, ViL-Small with other attentions, absolute position",
}
PRETRAINED = """\
## Weights of ImageNet-22K

Only the weights were published, without an accuracy or a recipe. These configs build the same
models, for 224 px and 1000 classes.
"""
DIFFERENCES = f"""\
## Where counts and published numbers differ

This section explains parameter counts that do not round to the published number, and MACs that
differ from it by more than {TOLERANCE:.1%}.
"""
USE = """\
## Using the published weights

The configs here load the published weights, and so does the `config.yaml` beside them. Loading
renames the parameters, resizes position tables to the config's image size and windows, and logs how
each key was used. `vil evaluate` requires `MODEL.MODEL_PATH`.

```bash
vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH model_best.pth
vil evaluate --config-file their/config.yaml --data DIR MODEL.MODEL_PATH their/model_best.pth
```

The head of ImageNet-22K weights has other classes. Initialize a new head (`FINETUNE.HEAD new`), or
keep the rows of the 1000 classes; the original code kept the first thousand:

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
    """Return the page. Fails if a count differs without a reason, or agrees despite one."""
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
    """Return a section per result file, which has the machine, the command and the rows."""
    parts = []
    for kind, title in MEASURED.items():
        for path in sorted(folder.glob(f"{kind}-*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            sources = (f"`{found['command']}`", found.get("machine"), f"`{path.name}`")
            source = "; ".join(filter(None, sources))
            parts.append(f"## {title}, measured\n\n{source}\n\n{measured_table(found['rows'])}")
    return parts


def measured_table(rows: dict[str, dict | list]) -> str:
    """Format rows: {name: metrics}, or {name: top-1 curves, one per seed}, of which only the last
    values are shown."""
    metrics = {name: row if isinstance(row, dict) else ends(row) for name, row in rows.items()}
    names = list(dict.fromkeys(key for row in metrics.values() for key in row))
    lines = [(name, *(shown(row.get(key, "")) for key in names)) for name, row in metrics.items()]
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
