"""Files from anywhere: what is found, what a base may be, and that hostile files do nothing."""

import json
import shutil
import subprocess
import sys

import pytest

from vil.config import ConfigError, dump, get_config
from vil.config.yaml_source import packaged_root

pytestmark = pytest.mark.smoke


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def refusal(file):
    with pytest.raises(ConfigError) as caught:
        get_config(file)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_packaged_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = get_config("_base_/classification.yaml")
    assert cfg == get_config("configs/_base_/classification.yaml")
    assert cfg.OPTIM.EPOCHS == 300
    shutil.copy(packaged_root() / "_base_/classification.yaml", tmp_path / "mine.yaml")
    assert get_config("mine.yaml") == cfg


def test_json_is_read(write):
    text = json.dumps({"OPTIM": {"LR": 1e-3}, "DATA": {"TRAIN": ["digits"]}}, indent="\t")
    cfg = get_config(write("x.json", text))
    assert (cfg.OPTIM.LR, cfg.DATA.TRAIN) == (1e-3, ("digits",))


@pytest.mark.detection
def test_a_task_that_is_set_after_a_detector_is_kept(write):
    write("task.yaml", "TASK: classification")
    write("detector.yaml", "DETECTION: {MODEL: retinanet}")
    for bases, task in {
        "[task.yaml, detector.yaml]": "detection",
        "[detector.yaml, task.yaml]": "classification",
        "[task.yaml, detector.yaml, task.yaml]": "classification",
    }.items():
        assert task == get_config(write("x.yaml", f"_BASE_: {bases}")).TASK, bases


def test_later_bases_win_and_the_file_wins_over_all(write):
    write("sub/a.yaml", "OPTIM: {LR: 1, WD: 0.1, MOM: 0.1}")
    write("b.yaml", "_BASE_: sub/a.yaml\nOPTIM: {LR: 2, WD: 0.2}")
    top = write("top.yaml", "OPTIM: {LR: 3}\n_BASE_: [sub/a.yaml, b.yaml]")
    optim = get_config(top).OPTIM
    assert (optim.LR, optim.WD, optim.MOM) == (3.0, 0.2, 0.1)


def test_a_base_may_be_anywhere_below_configs_or_packaged(write):
    write("configs/_base_/b.yaml", "OPTIM: {EPOCHS: 7}")
    assert get_config(write("configs/x/y/t.yaml", "_BASE_: ../../_base_/b.yaml")).OPTIM.EPOCHS == 7
    assert get_config(write("u.yaml", "_BASE_: _base_/classification.yaml")).OPTIM.EPOCHS == 300


def test_bases_in_a_circle(write):
    write("a.yaml", "_BASE_: b.yaml")
    assert "circle" in refusal(write("b.yaml", "_BASE_: a.yaml"))
    assert "circle" in refusal(write("c.yaml", "_BASE_: c.yaml"))


def test_a_base_cannot_leave_its_tree(write, tmp_path):
    secret = write("elsewhere/secret.yaml", "OPTIM: {LR: 2}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/link.yaml").symlink_to(secret)
    for base in ("../elsewhere/secret.yaml", str(secret), "link.yaml"):
        message = refusal(write("mine/top.yaml", f"OPTIM: {{WD: 0}}\n_BASE_: {base}"))
        assert "mine/top.yaml:2: _BASE_" in message
        assert "is outside of" in message
    assert "no such config file" in refusal(write("mine/top.yaml", "_BASE_: nothing.yaml"))


@pytest.mark.trust(7)
@pytest.mark.parametrize("times", [1, 2])
def test_the_number_of_base_files_is_limited(write, times):
    """A chain of many files, and a few files that each name the next one twice."""
    count = 2000 if times == 1 else 40
    for number in range(count):
        write(f"f{number}.yaml", f"_BASE_: [{', '.join([f'f{number + 1}.yaml'] * times)}]")
    write(f"f{count}.yaml", "SEED: 1")
    assert "f0.yaml: it reads more than 100 files through _BASE_" in refusal(
        write("top.yaml", "_BASE_: f0.yaml").with_name("f0.yaml")
    )


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)
)
HOSTILE = {
    "python tag": (
        "OPTIM: !!python/object/apply:os.system ['touch canary']",
        "tags are not allowed",
    ),
    "python tag as a key": ("? !!python/object/apply:os.mkdir [canary]\n: 1", "not allowed"),
    "python name": ("OPTIM: {LR: !!python/name:os.mkdir ''}", "tags are not allowed"),
    "own tag": ("%TAG ! tag:yaml.org,2002:python/\n---\nOPTIM: !name:os.mkdir ''", "not allowed"),
    "any tag": (
        "OPTIM:\n  LR: !!float 1",
        "x.yaml:2: tag:yaml.org,2002:float: tags are not allowed",
    ),
    "duplicate key": ("OPTIM:\n  LR: 1\n  LR: 2", "x.yaml:3: OPTIM.LR: given twice, the first"),
    "duplicate section": ("OPTIM: {LR: 1}\nOPTIM: {WD: 1}", "x.yaml:2: OPTIM: given twice"),
    "dotted duplicate": ("OPTIM: {LR: 1}\nOPTIM.LR: 2", "x.yaml:2: OPTIM.LR: given twice"),
    "merged key": ("OPTIM: &a {LR: 1}\nSOLVER: {<<: *a}", "SOLVER.<<"),
    "alias bomb": (BOMB, "too large"),
    "alias to itself": ("DATA: &a\n  KWARGS: *a", "too large"),
    "list in itself": ("DATA: {KWARGS: {a: &a [*a]}}", "too large"),
    "not a mapping": ("- 1\n- 2", "mapping of keys"),
    "list as key": ("[a, b]: 1", "a key must be a word"),
    "mapping in a list": ("DATA: {TRAIN: [{a: 1}]}", "plain values"),
    "two documents": ("OPTIM: {LR: 1}\n---\nOPTIM: {LR: 2}", "not valid YAML"),
    "broken": ("OPTIM:\n  LR: [1\nMODEL: {}", "x.yaml:3: not valid YAML"),
    "nested": ("DATA: {KWARGS: {a: " + "[" * 100, "nested more than"),
    "binary": ("\0\1\2", "not valid YAML"),
    "huge": ("#" * (1 << 20) + "\n", "has more than"),
    "section as value": ("OPTIM: 5", "x.yaml:1: OPTIM: expected a section"),
    "value as section": ("OPTIM: {LR: {a: 1}}", "x.yaml:1: OPTIM.LR.a: unknown key"),
    "bytes of brackets": (f"AUG: {{SCALE: '{'(' * 9000}'}}", "AUG.SCALE: expected tuple of float"),
}


@pytest.mark.trust(9)
@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused(write, tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(write("x.yaml", text))
    assert not (tmp_path / "canary").exists()


def test_a_plain_alias_is_fine(write):
    cfg = get_config(write("x.yaml", "DATA:\n  TRAIN: &sets [digits]\n  TEST: *sets"))
    assert cfg.DATA.TEST == ("digits",)
    assert "*" not in dump(cfg)


@pytest.mark.defect("B12")
def test_python_is_never_executed(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = write("x.py", "open('canary', 'w')\ncfg = {}")
    assert "the name of a config must end in" in refusal(code)
    assert "the name of a config must end in" in refusal(write("top.yaml", "_BASE_: x.py"))
    call = "__import__('pathlib').Path('canary').touch()"
    assert call in dump(get_config(write("y.yaml", f'MODEL: {{MODEL_PATH: "{call}"}}')))
    tag = "!!python/object/apply:os.mkdir [canary]"
    for opt in (f"AUG.SCALE=({call}, 1)", f"DATA.KWARGS={{a: {tag}}}", f"DATA.TRAIN=[{tag}]"):
        with pytest.raises(ConfigError):
            get_config(opts=[opt])
    assert not (tmp_path / "canary").exists()


WITHOUT_ASSERTS = """
from vil.config import ConfigError, get_config
for option in ("OPTIM.LRR=1", "OPTIM.LR=x", "OPTIM.LR=-1", "SOLVER.MIN_LR=2"):
    try:
        get_config(opts=[option])
    except ConfigError:
        continue
    raise SystemExit(option)
"""


def test_refusals_survive_optimised_python():
    """python -O drops asserts, so none may guard a config."""
    words = [sys.executable, "-O", "-c", WITHOUT_ASSERTS]
    subprocess.run(words, cwd=packaged_root().parent, check=True)
