import pytest

from tests.common.small_runs import TINY, succeeds


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run on generated images. Tests that change it make a copy."""
    run = tmp_path_factory.mktemp("trained") / "run"
    succeeds("train", "--output_dir", run, *TINY, "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0")
    return run
