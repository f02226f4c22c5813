"""`vil report` makes one page of a run that says what evaluation says, holds everything, and runs
nothing, whatever the names in the data are."""

import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.common.small_runs import FOLDER, SMALL, TINY, draw_pictures, metrics, results, vil

DATA = 3
HOSTILE = ["<img src=x onerror=alert(1)>", "\"'&lt;b $x^{ {{}}"]


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.said, self.markup = [], "", Path(file).read_text(encoding="utf-8")
        self.feed(self.markup)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.said += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of two classes with hostile names and one broken image."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 16), ("val", 9)):
        for number, name in enumerate(HOSTILE):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                colour = (250 * number, 9 * n, 90)
                Image.new("RGB", (300 - 7 * n, 200), colour).save(root / split / name / f"{n}.png")
    (root / "val" / HOSTILE[0] / "x.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    words = (*SMALL, *FOLDER, "DATA.MAX_BAD_FRACTION=0.1", "OPTIM.LR=0.02")
    ended = vil("train", *words, "--data", photos, "--output_dir", folder)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def page(run):
    ended = vil("report", run)
    assert (ended.code, ended.out) == (0, f"{run}/report.html\n"), ended.err
    return Page(run / "report.html")


# What is on the page


def test_the_metrics_are_those_of_evaluation(run, page):
    assert vil("evaluate", "--run", run, "OUTPUT_PERCLASS_ACC=True").code == 0
    found = results(run)["folder"]
    for text in (f"{found['top1']:.2f}%", f"{found['loss']:.4f}", "folder, 18 images"):
        assert text in page.said
    for right, count in zip(found["per_class"]["right"], found["per_class"]["count"]):
        assert f"{right}/{count}" in page.said
    for name in ("balanced_accuracy", "auroc", "average_precision", "ece"):
        assert f"{found[name]:.2f}%" in page.said
    assert re.search(r"macro F1\s*[\d.]+%\s*[\d.]+% to [\d.]+%", page.said)
    assert "mean confidence" in page.said


def test_config_command_machine_and_model(run, page):
    assert re.search(r"OPTIM\.LR0\.02\d", page.said)  # the value, then the default
    for text in ("vil", "torch ", "finished", "8 x 8 + 1", "total", "val/folder", "Started 20"):
        assert text in page.said
    assert len(page.all("svg")) >= 3


def test_names_from_the_data_are_text(page):
    for name in HOSTILE:
        assert page.said.count(name) >= 3
    assert not [1 for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "object", "form"})


def test_nothing_comes_from_elsewhere(page):
    assert all(a["src"].startswith("data:image/jpeg;base64,") for a in page.all("img"))
    assert [a["href"] for a in page.all("link")] == ["data:,"]
    assert not page.all("a")
    assert "url(" not in page.markup
    assert "@import" not in page.markup
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert len(page.markup.encode()) < 3e6


def test_images_and_tables_have_descriptions(page):
    assert len(page.all("img")) == 18
    assert all(a["alt"].startswith("An image of class") for a in page.all("img"))
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(a["role"] == "img" for a in page.all("svg") if "aria-hidden" not in a)
    assert page.all("html") == [{"lang": "en"}]


# Runs in every state


def test_a_run_that_is_still_training(run):
    """Its log ends in the middle of a line, and there is no checkpoint and no data."""
    shutil.copytree(
        run, "live", ignore=shutil.ignore_patterns("checkpoints", "report.html", "eval")
    )
    status = {"state": "running", "code": None, "step": 3, "time": "2026-01-01", "reason": ""}
    Path("live/status.json").write_text(json.dumps(status))
    with open("live/metrics.jsonl", "a") as log:
        test = {"step": 3, "epoch": 1.0, "split": "test/folder", "wall": 1.0, "top1": 12.25}
        log.write(json.dumps(test) + '\n{"step": 9, "epo')
    ended = vil("report", "live", "--no-eval", "--out", "live.html")
    assert (ended.code, ended.out) == (0, "live.html\n"), ended.err
    found = Page("live.html")
    assert "running" in found.said
    assert "Best top-1 in training" in found.said
    assert re.search(r"Test top-1\s*12.25%", found.said)
    assert not found.all("img")
    Path("live/converted.safetensors").touch()  # a run, not a folder of weights
    for name in ("status.json", "metrics.jsonl", "command.txt", "env.txt", "classes.txt"):
        Path("live", name).unlink()
    assert vil("report", "live", "--no-eval").code == 0
    assert "Nothing is logged yet." in Path("live/report.html").read_text()


def test_a_report_with_moved_data(run, photos):
    """KEY VALUE pairs and flags are for the evaluation."""
    ended = vil("report", run, "--data", "nowhere", "--out", "x.html")
    assert ended.code == DATA
    shutil.copytree(photos, "moved")
    words = ("--data", "moved", "--checkpoint", "last", "DEVICE", "cpu", "--out", "x.html")
    assert vil("report", run, *words).code == 0
    assert "last checkpoint, step " in Page("x.html").said
    assert str(photos) in Page("x.html").said  # the run's own config


def test_a_test_set_of_other_classes(trained):
    """DATA.TARGETMAP: true classes are the set's, answers the model's; no matrix of the two."""
    draw_pictures("pets", {"train/cat": 8, "train/dog": 8, "val/cat": 2, "val/dog": 3})
    Path("pets/map.json").write_text(json.dumps({"0": "cat(n1)", "2": "dog(n2)"}))
    shutil.copytree(trained, "run", symlinks=True)
    words = ["DATA.TEST=[folder]", "DATA.TARGETMAP=map.json", "DATA.KWARGS={}"]
    ended = vil("report", "run", "--data", "pets", *words)
    assert ended.code == 0, ended.err
    found = Page("run/report.html")
    assert "matrix" not in [a.get("class") for a in found.all("table")]
    answered = set(re.findall(r"predicted: (hue \d+) ", found.said))
    assert answered <= {"hue 0", "hue 180"}
    assert answered
    assert "true: cat" in found.said
    assert "true: dog" in found.said


# Several runs


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs that differ in the learning rate."""
    folders = [tmp_path_factory.mktemp("two") / name for name in ("slow", "fast")]
    for folder, lr in zip(folders, (1e-4, 0.05)):
        words = (*TINY, "DATA.KWARGS.n=16", f"OPTIM.LR={lr}", "--output_dir", folder)
        assert vil("train", *words).code == 0
    return folders


def test_a_comparison_of_runs(two):
    ended = vil("report", *two, "--out", "both.html")
    assert (ended.code, ended.out) == (0, "both.html\n"), ended.err
    found = Page("both.html")
    table = found.markup[found.markup.index("Config keys whose") :]
    table = table[: table.index("</table>")]
    assert re.findall(r'class="key">(.*?)<', table) == ["OPTIM.LR"]
    assert re.findall(r"<bdi>([\d.e-]+)</bdi>", table) == ["0.0001", "0.05"]
    loss = [[p["loss"] for p in metrics(folder, "val")] for folder in two]
    last = f"{min(values[-1] for values in loss):.4g}"
    assert f'best">★ {last}<' in found.markup
    charts = re.findall(r"<h3>(.*?)</h3>", found.markup)
    for title in ("top-1 on fake", "loss on fake", "loss on train", "learning rate"):
        assert title in charts
    legends = re.findall(r"<figcaption.*?</figcaption>", found.markup, flags=re.DOTALL)
    assert all("slow" in legend and "fast" in legend for legend in legends)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "img"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "several runs are compared in one file: add --out FILE"),
        (["typo", "--out", "x.html"], "typo is not the folder of a run"),
        (["labels", "--out", "x.html"], "labels is multilabel"),
    ],
)
def test_runs_that_cannot_be_compared(two, words, message):
    shutil.copytree(two[0], "labels", ignore=shutil.ignore_patterns("checkpoints"))
    text = Path("labels/config.yaml").read_text()
    Path("labels/config.yaml").write_text(text.replace("TASK: classification", "TASK: multilabel"))
    ended = vil("report", *two, *words)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_the_mean_and_spread_of_runs_that_differ_in_their_seed(two):
    for number in range(2):
        shutil.copytree(two[number], f"seed{number}", ignore=shutil.ignore_patterns("checkpoints"))
        text = Path(two[0], "config.yaml").read_text()
        Path(f"seed{number}/config.yaml").write_text(
            re.sub("\nSEED: .*", f"\nSEED: {number}", text)
        )
    assert vil("report", "seed0", "seed1", "--out", "x.html").code == 0
    values = [metrics(folder, "val")[-1]["top1"] for folder in two]
    expected = f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert expected in Page("x.html").markup
    assert "of 2 runs" in Page("x.html").markup
    assert vil("report", *two, "--out", "y.html").code == 0  # another learning rate
    assert "±" not in Page("y.html").markup


def test_runs_of_one_name_and_another_metric(two):
    """They are compared by the first run's metric, which the page says."""
    shutil.copytree(two[0], "a/run", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(two[1], "b/run", ignore=shutil.ignore_patterns("checkpoints"))
    text = Path("b/run/config.yaml").read_text()
    Path("b/run/config.yaml").write_text(text.replace("METRIC: ''", "METRIC: macro_f1"))
    ended = vil("report", "a/run", "b/run", "--out", "x.html")
    assert ended.code == 0, ended.err
    assert "b/run selects its best checkpoint by macro_f1" in Page("x.html").said
    assert "a/run" in Page("x.html").said
