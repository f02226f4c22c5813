"""Several processes measure the same as one, to the last digit.

Also a program, which `measure_on` starts once per rank: it prints the metrics as JSON.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CLASSES, CPU, meeting, pick, samples, toy_model
from vil.data.samplers import eval_batches
from vil.engine import distributed
from vil.engine.distributed import DistInfo, compute_on_main
from vil.utils.errors import DataError


def evaluate(dist):
    """Metrics and calibration on 361 images in batches of 8, and on 2 images."""
    sets = {}
    for name, count in (("many", 361), ("two", 2)):
        batches = eval_batches(count, batch_size=8, rank=dist.rank, world=dist.world)
        indices = [torch.tensor([place.index for place in batch]) for batch in batches]
        sets[name] = [pick(samples(count, seed=1), each) for each in indices]
    task = ClassificationTask(device=CPU, test_sets=sets, num_classes=CLASSES, per_class=True)
    model = toy_model()
    before, calibration = task.evaluate(model), task.calibrate(model)
    task.apply_calibration(calibration)
    return before, calibration, task.evaluate(model)


def measure_on(world):
    """What each of `world` processes prints."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__], text=True, stdout=subprocess.PIPE,
            env={**os.environ, **where, "RANK": str(n), "LOCAL_RANK": str(n),
                 "WORLD_SIZE": str(world), "PYTHONPATH": os.getcwd()},
        )
        for where in [meeting()] for n in range(world)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=100)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_metrics_do_not_depend_on_the_number_of_processes(world):
    alone = json.dumps(evaluate(DistInfo()))
    for rank, (metrics, error) in enumerate(measure_on(world)):
        assert metrics == alone
        wanted = "DataError: no" if rank == 0 else "RuntimeError: rank 0 failed: DataError: no"
        assert error == wanted


def refuse():
    raise DataError("no")


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = distributed.start("gloo", CPU)
    print(json.dumps(evaluate(place)))
    try:
        compute_on_main(refuse)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    distributed.stop()
