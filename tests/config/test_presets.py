"""A preset sets keys below files and the command line, and every one of them is printed."""

import logging
from pathlib import Path

import pytest

import vil
from vil.cli import main
from vil.config import describe_preset, get_config, load_config
from vil.utils.errors import ConfigError
from vil.workflows.configure import make_config

pytestmark = pytest.mark.smoke

NAMES = ("finetune", "small_data", "scratch")


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("VERSION: 1\nOPTIM:\n  WD: 0.3\n  EPOCHS: 20\nOUTPUT_DIR: runs/mine\n")
    return str(file)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_above_the_defaults_and_below_everything_else(name, recipe):
    cfg, sources = load_config(recipe, ["OPTIM.CLIP_GRAD", "2"], preset=name)
    assert (cfg.OPTIM.WD, cfg.OPTIM.EPOCHS, cfg.OPTIM.CLIP_GRAD) == (0.3, 20, 2.0)
    assert cfg.SOLVER.LR_POLICY == "cosine"
    assert sources["SOLVER.LR_POLICY"] == f"preset {name}"
    assert "VERSION" not in {key for key, source in sources.items() if source.startswith("preset")}
    assert load_config(recipe)[0].SOLVER.LR_POLICY == ""


def test_every_key_is_listed_with_what_overrides_it(recipe):
    options = ["OPTIM.CLIP_GRAD", "2", "LOSS.LABEL_SMOOTHING=0.1"]
    lines = describe_preset("finetune", *load_config(recipe, options, preset="finetune"))
    assert lines[0] == "preset finetune:"
    assert "  FINETUNE.HEAD new" in lines
    assert "  OPTIM.CLIP_GRAD 2.0, not 1.0 (from command line)" in lines
    assert "  LOSS.LABEL_SMOOTHING 0.1 (from command line)" in lines
    assert f"  OPTIM.WD 0.3, not 0.05 (from {recipe}:3)" in lines
    assert "  OPTIM.LR 0.0002" in lines


def test_the_rate_of_a_recipe_is_not_scaled_by_the_preset():
    cfg, sources = load_config(None, ["OPTIM.LR=1e-3"], preset="scratch")
    optim = cfg.OPTIM
    assert (optim.LR, optim.LR_REFERENCE_BATCH, optim.LR_SCALING) == (1e-3, 0, "auto")
    assert cfg.SOLVER.MIN_LR == 0.0
    lines = describe_preset("scratch", cfg, sources)
    assert "  OPTIM.LR_REFERENCE_BATCH 0, not 512 (because OPTIM.LR is set)" in lines
    alone = load_config(None, preset="scratch")[0]
    assert alone.OPTIM.LR_REFERENCE_BATCH == 512
    kept = load_config(None, ["OPTIM.LR_REFERENCE_BATCH=64"], preset="scratch")[0]
    assert (kept.OPTIM.LR, kept.OPTIM.LR_REFERENCE_BATCH) == (5e-4, 64)


def test_an_unknown_preset_suggests_the_nearest(capsys):
    with pytest.raises(ConfigError, match="unknown preset 'finetun'; did you mean 'finetune'"):
        make_config(preset="finetun")
    assert main(["train", "--preset", "smal_data"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'small_data'? (choices: finetune, scratch, small_data)" in error
    assert error.count("\n") == 1


def test_python_logs_the_keys_and_refuses_a_preset_below_a_full_config(recipe, caplog):
    caplog.set_level(logging.INFO)
    assert make_config(recipe, preset="small_data").MODEL.VIT.DROP_PATH == 0.2
    assert "OPTIM.EPOCHS 20, not 200 (from" in caplog.text
    with pytest.raises(ConfigError, match="preset 'scratch' has no effect on a CfgNode"):
        vil.train(get_config(recipe), preset="scratch", output_dir=Path(recipe).parent / "run")


@pytest.mark.long
def test_a_run_with_a_preset_resumes_from_its_saved_config(tmp_path, capsys):
    folder = str(tmp_path / "run")
    words = ["train", "--config-file", "digits/vil_nano.yaml", "--output_dir", folder]
    words += ["OPTIM.EPOCHS", "1", "SOLVER.WARMUP_EPOCHS", "0", "INPUT.IMAGE_SIZE", "32"]
    assert main([*words, "--preset", "finetune"]) == 0
    out = capsys.readouterr().out
    assert "preset finetune:\n  FINETUNE.HEAD new\n" in out
    assert get_config(tmp_path / "run" / "config.yaml").OPTIM.LAYER_DECAY == 0.75
    assert main(["train", "--output_dir", str(tmp_path / "run"), "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
