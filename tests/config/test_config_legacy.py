"""Files of the 2021 original load as they are, and nothing about them is changed silently."""

import logging
from pathlib import Path

import pytest

from vil.config import LEGACY_ATTN_BACKENDS, diff, get_config

pytestmark = pytest.mark.smoke

OLD = Path(__file__).parents[1] / "legacy"


@pytest.fixture(autouse=True)
def _see_warnings(caplog):
    caplog.set_level(logging.WARNING, logger="vil")


def test_the_old_recipe_is_the_new_base(caplog):
    """Apart from the drop period of the multistep policy, which a cosine schedule never reads, and
    the number of workers, which depends on the machine."""
    old, new = get_config(OLD / "msvit.yaml"), get_config("_base_/classification.yaml")
    assert diff(old, new) == {"OPTIM.DROP_FREQ": (30, 50), "DATALOADER.WORKERS": (6, -1)}
    assert not caplog.records


def test_the_old_finetuning_recipe(caplog):
    cfg = get_config(OLD / "msvit_384finetune.yaml")
    assert (cfg.OPTIM.OPT, cfg.OPTIM.LR, cfg.SOLVER.WARMUP_EPOCHS) == ("qhm", 0.01, 0.25)
    assert (cfg.INPUT.IMAGE_SIZE, cfg.FINETUNE.FINETUNE) == (384, True)
    assert not caplog.records


def test_a_config_saved_by_the_original(caplog):
    cfg = get_config(OLD / "config.yaml")
    assert "RE" not in cfg.DATALOADER
    assert cfg.MODEL.MODEL_PATH == ""
    assert cfg.DATA.TRAIN == ("imagenet",)
    assert cfg.AUG.RATIO == (3 / 4, 4 / 3)
    assert cfg.DATA.PATH == "/data/imagenet/2012"
    assert cfg.MODEL.VIT.MSVIT.ATTN_TYPE in LEGACY_ATTN_BACKENDS
    assert "distributed" not in cfg
    dropped, revived = (record.getMessage() for record in caplog.records)
    assert dropped.endswith("unknown keys: SOLVER.MAX_ITER, SOLVER.STEPS_PER_EPOCH, distributed")
    assert "ignored LN_EPS" in revived


def test_unknown_keys_are_dropped_only_from_files_the_original_saved(tmp_path, caplog):
    file = tmp_path / "config.yaml"
    file.write_text("distributed: True\nOPTIM:\n  LR: 0.1\n  LS:\n    EVAL: 1\n")
    assert get_config(file).OPTIM.LR == 0.1
    assert "unknown keys: distributed, OPTIM.LS.EVAL" in caplog.text


def test_ln_eps_of_a_file_of_today_needs_no_warning(tmp_path, caplog):
    file = tmp_path / "x.yaml"
    file.write_text("VERSION: 1\nMODEL: {VIT: {MSVIT: {LN_EPS: 1e-5}}}\n")
    assert get_config(file).MODEL.VIT.MSVIT.LN_EPS == 1e-5
    assert not caplog.records


@pytest.mark.defect("B4")
def test_the_misspelt_memory_format(caplog):
    assert get_config(opts=["AMP.MEMORY_FORMAT", "nwhc"]).AMP.MEMORY_FORMAT == "nhwc"
    assert "nwhc is read as nhwc" in caplog.text


def test_keys_without_effect_share_one_warning(caplog):
    words = ["OPTIM.WARMUP", "5", "MODEL.NONLINEARITY", "relu", "OPTIM.TEST_FREQ", "1000"]
    assert get_config(opts=words) == get_config()
    (record,) = caplog.records
    assert "OPTIM.WARMUP" in record.getMessage()
    assert "MODEL.NONLINEARITY" in record.getMessage()
    assert "TEST_FREQ" not in record.getMessage()


@pytest.mark.parametrize(("value", "kept"), [("0", 2), ("1", 1)])
def test_only_save_last_sets_the_number_of_kept_checkpoints(value, kept, caplog):
    assert kept == get_config(opts=["ONLY_SAVE_LAST", value]).RUN.KEEP
    assert not caplog.records
