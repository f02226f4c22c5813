"""Keys that the config no longer has: earlier configs load, and lost settings are reported."""

import pytest

from vil.config import get_config
from vil.config.removed import REMOVED

pytestmark = pytest.mark.smoke


def test_a_saved_config_with_former_defaults_loads_silently(tmp_path, caplog):
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{key}: {removed.default}\n" for key, removed in REMOVED.items()))
    assert get_config(file) == get_config()
    assert not caplog.records


def test_another_value_is_reported_once_with_its_place(tmp_path, caplog):
    file = tmp_path / "config.yaml"
    file.write_text("SEED: 3\nREGRESSION:\n  HUBER_DELTA: 2.0\n")
    assert get_config(file, ["MULTILABEL.CLIP=0.1"]).SEED == 3
    (record,) = caplog.records
    message = record.getMessage()
    assert f"REGRESSION.HUBER_DELTA ({file}:3): {REMOVED['REGRESSION.HUBER_DELTA'].note}" in message
    assert "MULTILABEL.CLIP (command line)" in message
    assert "\n" not in message
