"""Several processes compute the same as one, and wrong launches are refused with a reason."""

import pytest
import torch

from tests.common.one_rank import one_rank
from tests.common.toy_engine import CPU, launch, metrics, toy_train, weights
from vil.engine.build import process_group
from vil.engine.distributed import DistInfo, read_environment, start


def evaluations(folder):
    names = ("step", "split", "top1", "top5", "count")
    return [[m[name] for name in names] for m in metrics(folder) if m["split"] != "train"]


def losses(folder):
    return [m["loss"] for m in metrics(folder)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "accumulate", "options"), [(2, 3, {"clip_grad": 0.1, "ema": 0.8}), (3, 1, {})]
)
def test_ranks_together_are_one_process(world, accumulate, options, tmp_path):
    """10 steps of AdamW in float64; test sets of 361 and of 2 images: none for the third rank."""
    alone = tmp_path / "alone"
    toy_train(alone, dropout=0.0, **options)
    together = tmp_path / "together"
    outputs = launch(world, (together, {**options, "accumulate": accumulate}))
    assert "train epoch 2.00/2 " in outputs[0]
    assert outputs[1:] == [""] * (world - 1)  # only rank 0 speaks
    assert evaluations(together) == evaluations(alone)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-6)
    for file in ("model.safetensors", "ema.safetensors")[: 1 + ("ema" in options)]:
        ours, theirs = weights(together, file), weights(alone, file)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-9)


TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1",
}  # fmt: skip


def test_the_environment_of_torchrun_is_read():
    assert read_environment(TORCHRUN) == DistInfo(1, 2, 1)
    assert read_environment({"MASTER_PORT": "1", "HOME": "/"}) == DistInfo(0, 1, 0)
    assert DistInfo().is_main
    assert not DistInfo(1, 2, 1).is_main


def test_processes_that_srun_started_alone_are_refused():
    with pytest.raises(ValueError, match="srun started 8 processes .*scripts/train_slurm.sh"):
        read_environment({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"})
    with pytest.raises(ValueError, match="srun started many processes"):
        read_environment({"SLURM_STEP_NUM_TASKS": "many"})
    assert read_environment({"SLURM_STEP_NUM_TASKS": "1"}) == DistInfo()
    assert read_environment({"SLURM_STEP_NUM_TASKS": "4", **TORCHRUN}) == DistInfo(1, 2, 1)


@pytest.mark.defect("B23")
@pytest.mark.parametrize("name", TORCHRUN)
def test_a_partial_environment_is_refused_in_one_line(name):
    partial = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=f"incomplete: {name} not set") as caught:
        read_environment(partial)
    assert "\n" not in str(caught.value)


def test_one_gpu_for_several_processes_of_a_machine_is_refused(monkeypatch):
    first = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cuda:1 would put all 2 processes .*set DEVICE to cuda,"):
        start("nccl", torch.device("cuda:1"))


def test_a_group_of_the_calling_script_is_used_and_kept(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with one_rank():
        with process_group("gloo", CPU) as dist:
            assert dist == DistInfo(0, 1, 3)
        assert torch.distributed.is_initialized()
