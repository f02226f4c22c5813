"""Every link leads somewhere, and what pages name exists. The README's numbers are those published
or measured, and every config key does something.

tests/test_doc_blocks.py runs the code blocks.
"""

import csv
import importlib
import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from yacs.config import CfgNode

import vil
from benchmarks import gpu_tables
from tests.common.doc_commands import ROOT
from tests.common.doc_pages import PAGES, read, without_code
from tests.common.marks import cases
from tests.common.small_tasks import SMALL_TASKS
from vil.cli import COMMANDS, main
from vil.config import get_config
from vil.config.defaults import EXTENSIBLE, KEYS, SECTIONS
from vil.config.registries import HOMES, registry
from vil.config.removed import REMOVED
from vil.engine.logger import SLOW_DATA
from vil.tasks import TASKS
from vil.tasks.image.build import build_train_transform, transform_settings
from vil.tasks.image.task import MAX_EVAL_BATCH
from vil.workflows.execution import execution_of

README = read("README.md")
GENERATED = {"docs/reference/config.md"}
RESULTS = ROOT / "benchmarks/results"
GPU = RESULTS / "h200-2026-11-28"
STREAMED = [("time", "whole"), ("time", "streamed"), ("height", "low"), ("height", "high")]

# ------------------------------------------------------------------------------- pages and links


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings: lower case, dashes for spaces, no other punctuation."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title)) for title in titles)
    return {title.strip().lower().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if ":" in target:
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(str(file.relative_to(ROOT))), target


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\((\w+/\w+\.md)\)", read("docs/index.md")))
    assert {f"docs/{path}" for path in listed} == {p for p in PAGES if p.count("/") == 2}
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f" {path}\n" in site for path in listed)


def test_pages_that_code_and_pages_name_exist():
    files = subprocess.run(
        ["git", "grep", "-hoE", r"docs/[a-z_/0-9]+\.(md|png)", "--", "vil", "benchmarks", "scripts",
         "configs", "tools", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for path in set(files.stdout.split()):
        assert (ROOT / path).exists(), path


@pytest.mark.long
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    text = (tmp_path / "guides/performance/index.html").read_text(encoding="utf-8")
    (image,) = re.findall(r'src="([^"]*attention-scaling-cpu.png)"', text)
    assert (tmp_path / "guides/performance" / image).resolve().exists()
    assert (tmp_path / "MODEL_ZOO/index.html").exists()


# ------------------------------------------------------------------------------ what pages name


@pytest.mark.parametrize(
    "page",
    cases(
        [page for page in PAGES if "/from_" not in page and page not in GENERATED],
        text=lambda page: "".join(re.findall(r"DETECTION\.", read(page))),
    ),
)
def test_config_keys_exist(page):
    """In code; the pages for users of other code name its keys, too."""
    pattern = r"`[^`\n]*?\b([A-Z][A-Z_0-9]*(?:\.[A-Z][A-Z_0-9]*)+)\b[^`\n]*`"
    for key in re.findall(pattern, without_code(page)):
        sections = {*SECTIONS, *EXTENSIBLE, "OPTIM.NESTEROV.DAMPING"}
        known = {*KEYS, *sections, *REMOVED, "DATA.KWARGS"}
        assert {key, f"DETECTION.{key}"} & known or key.startswith("ViL_"), key


def test_the_package_page_has_every_file_of_its_tree():
    tree = read("docs/internals/package.md").split("```")[1].removeprefix("text\n")
    folders = []
    for line in tree.rstrip().splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        names = (
            re.match(r" *((?:[\w.]+/?(?:  )?)+)", line)[1].split()
            if indent == 0
            else [line.split()[0]]
        )
        for name in names:
            folders[indent:] = [name]
            assert (ROOT / "/".join(folders)).exists(), "/".join(folders)
    for path in [*(ROOT / "vil").iterdir(), *ROOT.iterdir()]:
        tracked = subprocess.run(
            ["git", "ls-files", str(path)], cwd=ROOT, capture_output=True, text=True
        )
        if path.is_dir() and not path.name.startswith((".", "_")) and tracked.stdout:
            assert f"{path.name}/" in tree, path.name


@pytest.mark.detection
def test_the_reference_names_every_command():
    commands = re.findall(
        r"^\| `vil ([\w ]+)` \| (.*) \|$", read("docs/reference/commands.md"), re.M
    )
    assert dict(commands) == COMMANDS


def test_the_reference_names_every_error_and_python_name():
    codes = read("docs/reference/faults.md")
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", codes, flags=re.MULTILINE)
    listed = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    errors = {name: error for name, error in vars(vil.errors).items() if name.endswith("Error")}
    assert len(errors) >= 9
    for name, error in errors.items():
        assert listed[name] == getattr(error, "exit_code", 75), name
    names = read("docs/tutorials/python.md")
    for name in vil.__all__:
        assert re.search(rf"`(vil\.)?{name}\b", names), name
    further = names.split("Further modules")[1]
    modules = re.findall(r"^\| `(vil\.[\w.]+)` \| (.*) \|$", further, flags=re.MULTILINE)
    assert len(modules) >= 7
    for module, exported in modules:
        for name in re.findall(r"`(\w+)`", exported):
            assert hasattr(importlib.import_module(module), name), (module, name)


# ------------------------------------------------------------------------------------- numbers


def result_rows() -> dict[str, str]:
    """{model and what: result} of the README's table, without the column of sources."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| ([\d.]+) \| (\w+)", README, flags=re.MULTILINE)
    assert {kind for *_, kind in rows} == {"published", "measured"}
    return {f"{model}: {what}": float(value) for model, what, value, _ in rows}


def test_the_readme_s_results_are_those_published_and_measured():
    found = iter(result_rows().values())
    with (ROOT / "vil/pretrained/published.csv").open(newline="") as file:
        top1 = {Path(row["config"]).stem: row["top1"] for row in csv.DictReader(file)}
    with (ROOT / "docs/published_detectors.csv").open(newline="") as file:
        box_ap = {row["config"]: row["box_ap"] for row in csv.DictReader(file)}
    published = (
        top1["vil_small_rpb"],
        top1["vil_base_deep_384_rpb"],
        box_ap["mask_rcnn_vil_small_3x"],
    )
    assert [next(found) for _ in range(3)] == [float(value) for value in published]
    metrics = vil.ViL_Nano_Weights.DIGITS.meta["metrics"]
    assert next(found) == round(next(iter(metrics.values()))["acc@1"], 2)
    scenes = json.loads((RESULTS / "scenes-cpu.json").read_text())
    assert next(found) == round(scenes["mask_rcnn"]["box_ap"], 1)
    assert next(found) == round(earth_medians()["vil_nano, mlp"][3], 2)
    times = attention_times()
    for other in ("sdpa", "chunk_handgrad"):
        assert next(found) == round(times[other, 0] / times["native", 0], 2)
    with (RESULTS / "model-cpu/model.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["way"] == "fp32"]
    ours = next(row for row in rows if row["model"] == "vil_tiny")
    swin = next(row for row in rows if "swin_tiny" in row["model"])
    assert next(found) == round(float(ours["training"]) / float(swin["training"]), 1)
    attention, models = gpu_tables.attention_table(GPU), gpu_tables.model_table(GPU)
    assert next(found) == float(attention[2].split(" | ")[5].split(", ")[1])
    compiled = next(line for line in models if "vil_small |" in line).split(" | ")[2]
    assert next(found) == min(map(float, compiled.split(", ")))
    assert next(found, None) is None


def earth_medians() -> dict[str, list[float]]:
    """{model: medians over seeds of the metrics on the validation band, then on the test band}."""
    runs = json.loads((RESULTS / "earth.json").read_text())["runs"]
    names = [(part, metric) for part in ("val", "test")
             for metric in ("miou", "lake IoU", "boundary_f1")]  # fmt: skip
    return {
        model: [statistics.median(row[part][metric] for row in rows) for part, metric in names]
        for model, rows in runs.items()
    }


def test_the_segmentation_page_has_the_measured_numbers():
    page = read("docs/guides/segmentation.md").replace("**", "")
    for model, medians in earth_medians().items():
        assert f"| {' | '.join(f'{value:.2f}' for value in medians)} |" in page, model


def test_the_detection_page_has_the_measured_numbers():
    page = read("docs/guides/detection.md")
    steps = json.loads((RESULTS / "detection-cpu.json").read_text())
    for row in steps["steps"].values():
        cells = f"| {row['parameters'] / 1e6:.1f}M | {row['seconds']:.1f} | {row['MiB']:,.0f} |"
        assert cells in page, cells
    for row in steps["large"].values():
        assert f"{row['seconds']:.0f} s and {row['GiB']:.1f} GiB" in page
    for row in json.loads((RESULTS / "scenes-cpu.json").read_text()).values():
        values = [f"{row[key]:.1f}" if key in row else "" for key in
                  ("box_ap50", "box_ap", "mask_ap50", "mask_ap")]  # fmt: skip
        assert f"| {' | '.join(values)} |" in page, values


def test_the_models_page_has_the_measured_gain_of_fine_tuning():
    rows = json.loads((RESULTS / "finetune-cpu.json").read_text())["rows"]
    page = read("docs/tutorials/models.md")
    for curves in rows.values():
        last = sorted(curve[-1] for curve in curves)
        assert f"| {last[len(last) // 2]:.2f} |" in page


def test_the_models_page_has_the_measured_numbers():
    rows = json.loads((RESULTS / "attentions-cpu.json").read_text())["rows"]
    page = read("docs/tutorials/models.md")
    for name, row in rows.items():
        step, memory = row["step / longformer"], row["peak MiB"]
        assert f"| {name} | {row['top1']:.2f} | {step:.2f} | {memory:.0f} MiB |" in page


def test_models_with_a_relative_bias_have_the_higher_published_accuracy():
    """As the models page says."""
    with (ROOT / "vil/pretrained/published.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["top1"]]
    top1 = {Path(row["config"]).stem: row["top1"] for row in rows}
    pairs = [(name, f"{name}_rpb") for name in top1 if f"{name}_rpb" in top1]
    assert len(pairs) == 5
    for absolute, relative in pairs:
        assert float(top1[relative]) > float(top1[absolute]), relative


def test_the_precision_page_has_the_measured_speed():
    with (RESULTS / "model-cpu/model.csv").open(newline="") as file:
        rows = {(row["model"], row["way"]): row for row in csv.DictReader(file)}
    ratio = float(rows["vil_tiny", "bf16"]["over_training"])  # relative to fp32
    assert f"trains {ratio:.2f} times as fast in bfloat16" in read("docs/guides/precision.md")


def test_the_page_of_reliability_has_the_limits_of_the_code():
    page = read("docs/guides/reliability.md")
    assert f"above {100 * SLOW_DATA:.0f} % there is a `hint:` line" in page
    assert f"at most {MAX_EVAL_BATCH} images" in page


def test_the_reversible_page_has_the_measured_numbers():
    result = json.loads((RESULTS / "reversible-cpu.json").read_text())
    page, rows = read("docs/guides/precision.md"), result["rows"]
    assert f"needs {100 * result['ratio']:.1f} % of the memory" in page
    for blocks in {name.split()[1] for name in rows}:
        a, b = (rows[f"{side} {blocks}"] for side in ("ordinary", "reversible"))
        time = b["seconds"] / a["seconds"]
        assert f"| {blocks} | {a['MiB']:.0f} | {b['MiB']:.0f} | {time:.2f} |" in page
    digits = json.loads((RESULTS / "reversible-digits-cpu.json").read_text())
    for side, top1 in digits["top1"].items():
        cells = [f"{value:.2f}" for value in (*top1, digits["means"][side])]
        assert f"| {side} | {' | '.join(cells)} |" in page


def test_the_streaming_page_has_the_measured_numbers():
    result = json.loads((RESULTS / "streaming-cpu.json").read_text())
    page = read("docs/guides/streaming.md")
    rows = [*(result[part][side] for part, side in STREAMED), result["jpeg"], result["large"]]
    for row in rows:
        assert f"| {row['seconds']:.1f} | {row['MiB']:.0f} MiB |" in page
    tiles = result["tiles"]
    for name, row in (("tiles", tiles), ("streamed", tiles["crop"])):
        cells = " | ".join(f"{100 * share:.1f} %" for share in row["different"])
        assert re.search(rf"^\| {name}\b[^|]* \| {re.escape(cells)} \|$", page, re.M), cells


@pytest.mark.parametrize(
    ("page", "file", "metric"),
    [
        ("labels", "imbalance", "balanced_accuracy"),
        ("optimizers", "optimizers-digits", "top1"),
    ],
)
def test_guides_have_the_measured_numbers_of_each_seed(page, file, metric):
    result = json.loads((RESULTS / f"{file}.json").read_text())
    text = read(f"docs/guides/{page}.md")
    for name, values in result[metric].items():
        cells = [f"{value:.2f}" for value in (*values, result["median"][name])]
        assert f"| {name} | {' | '.join(cells)} |" in text


def test_the_guide_has_the_measured_comparison_with_linear_models():
    result = json.loads((RESULTS / "labels-and-numbers-digits.json").read_text())
    digits, angle = result["scores"].values()
    text = read("docs/guides/labels.md")
    for name, scores in digits.items():
        map, mae, r2 = scores["map"], angle[name]["mae"], angle[name]["r2"]
        assert f"| {name} | {map:.2f} | {mae:.2f} | {r2:.3f} |" in text


def test_the_guide_has_the_measured_ways_to_deploy():
    text = read("docs/guides/deploy.md")
    paths = re.findall(r"`(\S+?)` \|", next(x for x in text.splitlines() if "published top-1" in x))
    for folder in ("deploy-tiny", "deploy-small"):
        rows = json.loads((RESULTS / folder / "deploy.json").read_text())["rows"]
        for name in dict.fromkeys(row["model"] for row in rows):
            of_path = {row["path"]: row for row in rows if row["model"] == name}
            speeds = [f"{of_path[path]['images_per_second_16']:.1f}" for path in paths]
            cells = [name.removeprefix("timm/"), str(of_path["eager"]["published"]), *speeds]
            assert f"| {' | '.join(cells)} |" in text


def test_the_tables_of_a_gpu_are_the_measured_ones():
    text = read("docs/guides/performance.md")
    assert "\n".join(gpu_tables.attention_table(GPU)) in text
    assert "\n".join(gpu_tables.model_table(GPU)) in text


@pytest.mark.parametrize("file", ["untuned-cpu.json", "untuned-cpu-amd.json"])
def test_the_performance_page_has_the_measured_speeds(file):
    ratios = json.loads((RESULTS / file).read_text())["ratios"]
    text = read("docs/guides/performance.md")
    pairs = {"vil_tiny": "deit_tiny_patch16_224", "vil_small": "swin_tiny_patch4_window7_224"}
    pairs_of_tiny = ("vil_tiny", pairs["vil_tiny"])
    for way in ("evaluation", "training", "optimized", "one image", "one image, optimized"):
        starts = [(f"{name}, {way}, {dtype}: ", other) for name, other in pairs.items()
                  for dtype in ("float32", "bfloat16")]  # fmt: skip
        cells = [
            f"{ratios[f'{start}images per second']:.3g} ({ratios[f'{start}over {other}']:.2f})"
            for start, other in starts
        ]
        assert f"| {' | '.join(cells)} |" in text
    text = " ".join(text.split())
    for what, sentence in (
        (
            "a busy process",
            "takes {:.1f} times as long for vil_tiny and {:.1f} times for deit_tiny",
        ),
        ("the same training", "next to the same training, {:.1f} and {:.1f} times"),
    ):
        pair = [ratios[f"{name}, training step: next to {what}"] for name in pairs_of_tiny]
        assert sentence.format(*pair) in text


def test_the_tutorial_has_the_measured_times_of_patched_models():
    text = read("docs/tutorials/pretrained.md")
    rows = json.loads((RESULTS / "patch-attention-cpu.json").read_text())["rows"]
    found = {way: [row for row in rows if row["way"] == way] for way in ("fused", "patched")}
    lines = {"|": [f"{row['pixels']:,} px" for row in found["fused"]]}
    for name, way in (("full", "fused"), ("local", "patched")):
        lines[f"| {name}, seconds"] = [f"{row['seconds']:.2f}" for row in found[way]]
        lines[f"| {name}, MiB"] = [f"{row['mib']:,.0f}" for row in found[way]]
    shares = [b["seconds"] / a["seconds"] for a, b in zip(*found.values())]
    lines["| local over full, seconds"] = [f"{share:.2f}" for share in shares]
    for start, cells in lines.items():
        assert f"{start} | {' | '.join(cells)} |" in text
    assert f"takes {shares[1]:.2f} of the time" in read("docs/guides/patch_attention.md")


def test_the_guide_has_the_measured_gain_of_distillation():
    text = read("docs/guides/distillation.md")
    rows = json.loads((RESULTS / "distillation.json").read_text())["rows"]
    for start in {row["start"]: None for row in rows}:
        own = [row for row in rows if row["start"] == start]
        cells = [f"{statistics.median(row[name] for row in own):.2f}" for name in ("top1", "probe")]
        assert f"| {start} | {' | '.join(cells)} |" in text


def test_the_guide_has_the_measured_gain_of_a_teacher_of_detectors():
    text = read("docs/guides/distillation.md")
    found = json.loads((RESULTS / "detector-distillation.json").read_text())
    assert f"with a box AP of {found['teacher']:.1f} on 400 others" in text
    for name, values in found["box_ap"].items():
        label = {"alone": "alone", "alone more epochs": "alone, more epochs"}.get(
            name, f"with the teacher, `DISTILL.SHARE {name.partition(' ')[2]}`"
        )
        epochs = found["epochs"]["more" if "more" in name else "few"]
        assert f"| {label} | {epochs} | {', '.join(f'{v:.2f}' for v in values)} |" in text


def test_the_guides_have_the_measured_starts_on_few_pictures():
    rows = json.loads((RESULTS / "stamps.json").read_text())["rows"]
    for page in ("docs/guides/distillation.md", "docs/tutorials/pretrained.md"):
        text = read(page)
        for name in {row["network"]: None for row in rows}:
            own = [row for row in rows if row["network"] == name]
            each = ", ".join(f"{row['top1']:.2f}" for row in own)
            assert f"| {name} | {own[0]['epochs']} | {each} |" in text


def test_the_tutorial_has_the_measured_accuracy_of_features():
    text = read("docs/tutorials/pretrained.md")
    files = [json.loads((RESULTS / f"earth-tiles{n}.json").read_text()) for n in ("", "-896")]
    rows = [sorted(file["rows"], key=lambda row: row["pixels"]) for file in files]
    for own, way in itertools.product(rows, ("full", "local")):
        for name in ("knn", "linear"):
            cells = [f"{row[name]:.2f}" for row in own if row["attention"] == way]
            label = {"knn": "nearest neighbors", "linear": "linear probe"}[name]
            assert f"| {way}, {label} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("folder", ["deploy-nano", "deploy-cutouts"])
def test_the_guide_has_the_measured_agreement(folder):
    rows = json.loads((RESULTS / folder / "deploy.json").read_text())["rows"]
    least = f"{min(row['agreement'] for row in rows):.1f} %"
    top1 = {row["path"]: f"{row['top1']:.2f}" for row in rows}
    cells = [top1["eager"], least, top1["onnx+int8"], top1["onnx+int8+static"]]
    assert f"| {' | '.join(cells)} |" in read("docs/guides/deploy.md")


def test_the_performance_page_has_the_measured_times_of_attention():
    page = read("docs/guides/performance.md").replace("  ", " ")
    rows = json.loads((RESULTS / "attention-scaling-cpu.json").read_text())["rows"]
    rows = {(row["backend"], row["dtype"], row["side"]): row for row in rows}
    sides = sorted({side for _, _, side in rows})
    spread = []
    for dtype in ("float32", "bfloat16"):
        for name in ("native", "blocked", "chunk_handgrad", "sdpa"):
            times = [rows.get((name, dtype, side), {}).get("both_ns_per_pair") for side in sides]
            cells = [f"{time:.2f}" if time else "" for time in times]
            assert f"| {name} | {' | '.join(cells)} |".replace("  ", " ") in page
        large = [rows["native", dtype, side]["both_ns_per_pair"] for side in sides if side >= 56]
        spread.append(max(large) / min(large) - 1)
    assert f"differs by {100 * max(spread):.0f} % at most" in page
    for name in ("native", "sdpa"):
        assert f"{rows[name, 'float32', 56]['both_us_per_token']:.2f}" in page


def attention_rows():
    rows = json.loads((RESULTS / "attention-cpu/attention.json").read_text())["rows"]
    return {(row["backend"], row["mode"]): row for row in rows}


def attention_times():
    return {key: row["forward_ms"] + row["backward_ms"] for key, row in attention_rows().items()}


def test_the_performance_page_has_the_measured_ratios():
    page, rows, times = read("docs/guides/performance.md"), attention_rows(), attention_times()
    ratios = {
        "times as fast as torch's full attention": lambda name: times["sdpa", 0] / times[name, 0],
        "times as fast as the 2021 hand-written gradient": lambda name: (
            times["chunk_handgrad", 0] / times[name, 0]
        ),
        "time over that of the matmuls alone": lambda name: times[name, 0] / times["floor", 0],
        "memory over that of the 2021 gradient": lambda name: (
            rows[name, 0]["extra_mib"] / rows["chunk_handgrad", 0]["extra_mib"]
        ),
    }
    for what, ratio in ratios.items():
        cells = " | ".join(f"{ratio(name):.3g}" for name in ("native", "blocked"))
        assert f"| {what} | {cells} |" in page
    assert f"takes {times['blocked', 1] / times['blocked', 0]:.3g} of the time" in page


# ----------------------------------------------------------------------------------------- keys


@pytest.mark.defect("B36")
@pytest.mark.long
def test_every_key_is_read_or_said_to_do_nothing(tmp_path, monkeypatch):
    """Train every task and evaluate one, noting which keys are asked for: the rest is dead."""
    names, asked, kept = {}, set(), []

    def watched(node: CfgNode, name: str):
        if name not in node:
            raise AttributeError(name)
        value = dict.__getitem__(node, name)
        key = names.get(id(node), "") + name
        asked.add(key)
        if isinstance(value, CfgNode):
            names[id(value)] = f"{key}."
            kept.append(value)  # alive, so that no id is given away twice
        return value

    monkeypatch.setattr(CfgNode, "__getattr__", watched)
    monkeypatch.setattr(CfgNode, "__getitem__", watched, raising=False)
    data = ["DATA.TRAIN=fake", "DATA.TEST=fake", "DATA.NUM_CLASSES=10", "DATALOADER.BSZ=8"]
    data += ["DATA.KWARGS={n: 16, size: 32, num_classes: 10}"]
    model = ["INPUT.IMAGE_SIZE=32", "MODEL.VIT.MSVIT.ARCH=l1,d8,h1,p8", "OPTIM.EPOCHS=1"]
    switches = ["AUG.MIXUP_PROB=1", "AUG.MIXUP=0.8", "AMP.ENABLED=True", "FINETUNE.FINETUNE=True"]
    words = ["train", *data, *model, *switches, "--output_dir", str(tmp_path)]
    assert main(words) == main([*words, "--resume"]) == 0
    assert main(["evaluate", "--run", str(tmp_path)]) == 0
    assert main([*words[:-1], str(tmp_path / "student"), f"DISTILL.TEACHER={tmp_path}"]) == 0
    further = ["DATA.FOLDS=2", "OPTIM.LR_REFERENCE_BATCH=16", "MULTILABEL.LOSS=asymmetric"]
    for name, settings in SMALL_TASKS.items():
        place = ["--output_dir", str(tmp_path / name), f"DATA.PATH={tmp_path}"]
        assert main(["train", *place, *settings, *further, "OPTIM.EPOCHS=1"]) == 0
    augmented = get_config(opts=["AUG.TIMM_AUG.USE_TRANSFORM=True"])
    build_train_transform(augmented, transform_settings(augmented))
    execution_of(get_config(opts=["MODEL.COMPILE=True"]), torch.device("cpu"))
    components = (entry for kind in HOMES for entry in registry(kind).values())
    theirs = {key for entry in components for key in entry.key_names.values()}
    tasks = (entry.load() for entry in TASKS.values())
    theirs |= {key for task in tasks for key in getattr(task, "target_keys", {}).values()}
    unread = {key for key in KEYS if key not in asked} - {"VERSION", "IMPORTS"} - theirs
    assert unread == set()
