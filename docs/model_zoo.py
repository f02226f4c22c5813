"""Write MODEL_ZOO.md: every published model with its published numbers and our counts.

python docs/model_zoo.py            write the file
python docs/model_zoo.py --check    compare with the file instead; exit code 1 if it differs

vil/pretrained/published.csv has the published numbers that cannot be computed. zoo_counts counts
the configs' models on the meta device, zoo_reasons explains differences, and zoo_detectors has the
detectors.
"""

import argparse
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

PAGE = ROOT / "MODEL_ZOO.md"

HEAD = """\
# Model zoo

Every published ViL classifier and detector as a config. `python docs/model_zoo.py` writes this
page; do not edit it by hand.

Accuracies and the first number of each pair are those **published** by the authors, and were not
measured again here. The second one is **counted**: parameters and multiply-accumulates (MACs) of
one image, computed from the model that the config builds, without biases, norms and softmax. The
authors call MACs FLOPs. "22K" means pre-trained on ImageNet-22K. A star means that a count
[differs from the published number](#where-counts-and-published-numbers-differ).

`vil.get_model(NAME, weights=MEMBER)` loads the weights in the last column, also through timm: see
[weights](docs/guides/weights.md). The published weights are no longer online;
`vil/pretrained/published.csv` has the folder of each in the authors' storage, and its top-5
accuracy. The only weights that ship with the package are those of `vil_nano`, trained on the digits
(`ViL_Nano_Weights.DIGITS`).
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

The configs here load the published weights, and so does the `config.yaml` beside them:

```bash
vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH model_best.pth
vil evaluate --config-file their/config.yaml --data DIR MODEL.MODEL_PATH their/model_best.pth
```

The head of ImageNet-22K weights has other classes. Start a new head (`FINETUNE.HEAD new`), or keep
the rows of the 1000 classes. The original code kept the first thousand:

```bash
seq 0 999 > rows.txt
scripts/finetune_384.sh imagenet/vil_medium_deep_384.yaml model_best.pth DIR runs/medium_384 \\
    FINETUNE.HEAD rows:rows.txt
```
"""


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
    return "\n".join([*parts, USE])


def results(rows: Sequence[Row]) -> str:
    header = ["config", "px", "pre-trained", "top-1", "parameters", "MACs", "weights"]
    lines = []
    for row in rows:
        ours = count(row.config)
        lines.append(
            [
                link(row.config) + " \\*" * bool(row.why),
                str(ours.side),
                "22K" if row.pretraining == "22K" else "",
                row.top1,
                f"{row.parameters}M, {mega(ours.parameters)}",
                f"{row.macs}G, {giga(ours.macs)}",
                f"`{row.weights}`" if row.weights else "",
            ]
        )
    filled = [at for at in range(len(header)) if any(line[at] for line in lines)]
    header, *lines = [[line[at] for at in filled] for line in (header, *lines)]
    return table(header, lines)


def pretrained(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        ours = count(row.config)
        counts = mega(ours.parameters), giga(ours.macs)
        lines.append((link(row.config), *counts, f"`{row.weights}`"))
    return table(("config", "parameters", "MACs", "weights"), lines)


def link(config: str) -> str:
    return f"[`{Path(config).stem}`](configs/{config})"


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
