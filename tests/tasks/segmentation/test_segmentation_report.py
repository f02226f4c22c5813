"""The report of a segmentation model: the metrics of evaluation, confusions, the worst images."""

import re

import numpy as np
import pytest
from PIL import Image

from vil.tasks.segmentation import IGNORE, metrics
from vil.tasks.segmentation.predictions import default_palette
from vil.tasks.segmentation.report import draw_worst, report_segmentation


class Maps:
    """A dataset of two images, whose class "sky" has no pixels and whose first rows are not
    labeled. The second image cannot be read."""

    def __init__(self, num_classes):
        self.classes = ["sky", "<b>sea</b>", *(f"c{n}" for n in range(2, num_classes))]
        self.palette = default_palette(num_classes)
        self.masks = np.random.default_rng(0).integers(1, num_classes, (2, 30, 40)).astype(np.int16)
        self.masks[:, :4] = IGNORE

    def __len__(self):
        return len(self.masks)

    def image(self, index):
        if index == 1:
            raise OSError
        return Image.new("RGB", (40, 30), (9, 99, 199))

    def mask(self, index):
        return self.masks[index]

    def sample_name(self, index):
        return f"val/{index}.jpg"


def evaluate(dataset):
    """Return the counts of predictions with some errors, and the images with their predictions."""
    counts, worst = metrics.Counts.zeros(len(dataset.classes)), []
    for index, mask in enumerate(dataset.masks):
        predicted = np.maximum(mask, 1)
        predicted[index::3] = 1 + predicted[index::3] % (len(dataset.classes) - 1)
        own = metrics.count(mask, predicted, len(dataset.classes), 2)
        counts, value = counts + own, metrics.values(own)["miou"]
        worst.append((index, value, predicted))
    return counts, worst


def cells(row):
    return re.findall(r"<td[^>]*>([^<]*)</td>", row)


@pytest.mark.parametrize("num_classes", [3, 70])
def test_the_page_says_what_evaluation_says(num_classes):
    dataset = Maps(num_classes)
    counts, worst = evaluate(dataset)
    report = report_segmentation(dataset, counts, worst, "own", "best checkpoint, step 7")
    values = metrics.values(counts)
    cards = {title: value for title, value, _ in report.cards}
    assert cards["mIoU, evaluated for this page"] == f"{values['miou']:.2f}%"
    assert cards["Pixel accuracy"] == f"{values['pixel_accuracy']:.2f}%"
    assert cards["Boundary F1"] == f"{values['boundary_f1']:.2f}%"
    assert cards["Images"] == "2"
    (page,) = report.sections
    assert "<b>" not in page
    assert page.count("data:image/") == 3
    assert page.count("cannot be read any more") == 1
    assert "the 24 of 70 classes" in page if num_classes == 70 else "other classes" not in page
    table = page[: page.index("</table>")]
    rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)[1:]
    names = [re.search("<bdi>(.*)</bdi>", row)[1] for row in rows]
    per_class = metrics.per_class(counts, dataset.classes)
    shown = [name.replace("&lt;", "<").replace("&gt;", ">") for name in names]
    iou = [per_class["iou"][name] for name in shown]
    assert np.array_equal(iou, sorted(iou, key=lambda value: (np.isnan(value), value)), True)
    for name, row in zip(shown, rows):
        expected = [per_class[key][name] for key in ("iou", "accuracy", "boundary_f1")]
        texts = ["absent" if np.isnan(value) else f"{value:.2f}" for value in expected]
        assert cells(row)[:3] == texts
    if num_classes == 3:
        assert cells(rows[-1])[:4] == ["absent", "absent", "absent", "0.00"]
    else:
        assert len(rows) == 60
        assert "69 classes; 1 do not occur" in table


def test_the_confusions_are_shares_of_the_true_class():
    dataset = Maps(3)
    counts, worst = evaluate(dataset)
    page = str(report_segmentation(dataset, counts, worst, "own", "").sections[0])
    *_, matrix = page.partition("true \\ predicted")
    rows = re.findall(r"<tr>.*?</tr>", matrix[: matrix.index("</table>")], re.DOTALL)
    shares = 100 * counts.confusion[1:] / counts.confusion[1:].sum(axis=1, keepdims=True)
    assert cells(rows[0]) == ["0"] * 3
    assert [cells(row)[1:] for row in rows[1:]] == [[f"{s:.1f}" for s in row[1:]] for row in shares]
    true, predicted, count = max(
        ((i, j, counts.confusion[i, j]) for i, j in ((1, 2), (2, 1))), key=lambda each: each[2]
    )
    *_, mistakes = page.partition("The most frequent errors")
    first = re.findall(r"<tr>.*?</tr>", mistakes, re.DOTALL)[1]
    assert cells(first) == [f"{count:,}", f"{shares[true - 1, predicted]:.2f}%"]


def test_without_errors_or_labels():
    """A page can be drawn for a perfect model, and for a test set without labels."""
    dataset = Maps(3)
    dataset.masks[:, 4:] = 1
    truth = metrics.count(dataset.masks[0], np.maximum(dataset.masks[0], 0), 3, 2)
    assert "No errors." in report_segmentation(dataset, truth, [], "own", "").sections[0]
    nothing = report_segmentation(dataset, metrics.Counts.zeros(3), [], "own", "")
    assert nothing.cards[0][1] == "absent"


def test_the_worst_images_beside_their_truth(tmp_path):
    """An unreadable image is left out, and drawings of an earlier call are removed."""
    dataset = Maps(4)
    _, worst = evaluate(dataset)
    for old in ("own-7-x.png", "other-1-x.png"):
        (tmp_path / old).touch()
    written = draw_worst(dataset, worst, tmp_path, "own")
    assert [path.name for path in written] == ["own-1-0.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1-x.png", "own-1-0.png"]
    pixels = np.asarray(Image.open(written[0]))
    image = (pixels == (9, 99, 199)).all(axis=-1)
    top, width = np.nonzero(image)[0].min(), 480
    panels = [pixels[top : top + 360, x : x + width][6::12, 6::12] for x in (0, 488, 976)]
    assert (panels[0] == (9, 99, 199)).all()
    truth, predicted = dataset.masks[0], worst[0][2]
    assert np.array_equal(panels[1][4:], dataset.palette[truth[4:]])
    assert (panels[1][:4, :, 0] == panels[1][:4, :, 1]).all()  # gray
    assert np.array_equal(panels[2], dataset.palette[predicted])
