"""Compare trained networks with linear models: the digits in a scene, and the angle of a digit.

  python benchmarks/labels_and_numbers.py [--folder FOLDER] [--json FILE]

Trains digits/sets_vil_nano.yaml and digits/angle_vil_nano.yaml for 40 epochs with three seeds, and
evaluates the last epoch on the validation images. One linear model is fitted to the pixels (gray,
24 x 24). Another is fitted to the features of the digit classifier whose weights come with the
package. The regularization of both is selected on a fifth of the training images.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from shared import RESULTS, add_json, make_parser, train_variants, write_json
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import vil
from vil.data import ImageDataset
from vil.data.datasets.digit_targets import DigitAngles, DigitSets
from vil.pretrained.catalog import DIGITS
from vil.report.run_record import metrics
from vil.utils.machine import processor
from vil.utils.text_table import align

EPOCHS = 40
SEEDS = (0, 1, 2)
WEIGHTS = DIGITS.url
STRENGTHS = np.logspace(-2, 5, 8)  # strengths of the L2 regularization to try
Scores = dict[str, float]


def fit_numbers(strength: float, x: np.ndarray, y: np.ndarray) -> Callable:
    return make_pipeline(StandardScaler(), Ridge(alpha=strength)).fit(x, y).predict


def score_numbers(y: np.ndarray, predicted: np.ndarray) -> Scores:
    return {"mae": mean_absolute_error(y, predicted), "r2": r2_score(y, predicted)}


def fit_labels(strength: float, x: np.ndarray, y: np.ndarray) -> Callable:
    linear = OneVsRestClassifier(LogisticRegression(C=1 / strength, max_iter=300))
    return make_pipeline(StandardScaler(), linear).fit(x, y).predict_proba


def score_labels(y: np.ndarray, predicted: np.ndarray) -> Scores:
    return {"map": 100 * average_precision_score(y, predicted, average="macro")}


class Comparison(NamedTuple):
    """A network and a linear model for the same targets.

    config: the network's config is digits/<config>_vil_nano.yaml. dataset, size: dataset, and side
    of the images in pixels. fit(strength, x, y) fits the linear model and returns a function that
    predicts. score(y, predicted) returns {metric: value}. sign: 1 if a higher value of the first
    metric is better, -1 if a lower one is.
    """

    config: str
    dataset: type[ImageDataset]
    size: int
    fit: Callable[[float, np.ndarray, np.ndarray], Callable]
    score: Callable[[np.ndarray, np.ndarray], Scores]
    sign: int


COMPARISONS = {
    "digits in a scene": Comparison("sets", DigitSets, 96, fit_labels, score_labels, 1),
    "angle of a digit": Comparison("angle", DigitAngles, 64, fit_numbers, score_numbers, -1),
}


def read_pixels(dataset: ImageDataset, size: int) -> np.ndarray:
    """Return the images of a dataset in gray at 24 x 24 pixels, (N, 576), from 0 to 1."""
    images = (dataset.image(index).convert("L") for index in range(len(dataset)))
    small = [np.asarray(image.resize((24, 24), Image.Resampling.BOX)) for image in images]
    return np.stack(small).reshape(len(small), -1) / 255


def read_features(dataset: ImageDataset, size: int) -> np.ndarray:
    """Return the features (N, D) that the packaged digit classifier computes for a dataset."""
    images = [dataset.image(index) for index in range(len(dataset))]
    return vil.embed(WEIGHTS, images, {"INPUT.IMAGE_SIZE": size}, batch_size=32)


def fit_best(comparison: Comparison, x: np.ndarray, y: np.ndarray) -> Callable:
    """Fit a linear model to all images, with the regularization that is best on a held-out fifth of
    them. Returns a function that predicts."""
    order = np.random.RandomState(0).permutation(len(x))
    held, kept = order[: len(x) // 5], order[len(x) // 5 :]

    def quality(strength: float) -> float:
        predict = comparison.fit(strength, x[kept], y[kept])
        return comparison.sign * first(comparison.score(y[held], predict(x[held])))

    return comparison.fit(max(STRENGTHS, key=quality), x, y)


def first(scores: Scores) -> float:
    return next(iter(scores.values()))


def compare(comparison: Comparison, folder: Path) -> dict[str, Scores]:
    """Evaluate both linear models and the networks. Returns {model: metrics}; for the networks, the
    metrics are medians over the seeds. folder: for the runs."""
    train, val = (comparison.dataset(None, split) for split in ("train", "val"))
    rows = {}
    for name, read in {"linear, pixels": read_pixels, "linear, features": read_features}.items():
        predict = fit_best(comparison, read(train, comparison.size), train.targets)
        rows[name] = comparison.score(val.targets, predict(read(val, comparison.size)))
    config = f"digits/{comparison.config}_vil_nano.yaml"
    train_variants(config, folder, {"OPTIM.EPOCHS": EPOCHS}, {"trained": {}}, SEEDS)
    last = [
        [line for line in metrics(run / "metrics.jsonl") if line["split"].startswith("val")][-1]
        for run in (folder / "runs").iterdir()
    ]
    rows["trained"] = {
        name: statistics.median(line[name] for line in last) for name in rows["linear, pixels"]
    }
    return rows


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: temporary")
    add_json(parser, RESULTS / "labels-and-numbers-digits.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        found = {name: compare(task, root / task.config) for name, task in COMPARISONS.items()}
    for name, rows in found.items():
        head = list(rows["trained"])
        cells = [
            [row, *(f"{value:.3f}" for value in scores.values())] for row, scores in rows.items()
        ]
        print(f"\n{name}\n{align([['', *head], *cells])}")
    write_json(
        args.json, {"machine": processor(), "epochs": EPOCHS, "seeds": SEEDS, "scores": found}
    )
