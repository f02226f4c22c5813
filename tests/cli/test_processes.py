"""Processes that a run on a CPU starts itself: as many as asked for, and they compute the same."""

import os

import pytest
import torch
from safetensors.torch import load_file
from small_runs import TINY, checkpoint, environment, metrics, vil

from vil.cli import processes
from vil.utils.errors import DataError

CPU = torch.device("cpu")
TWO = "DISTRIBUTED.CPU_PROCESSES=2"
EQUAL = ("MODEL.VIT.DROP_PATH=0", "OPTIM.EPOCHS=1")


class Ended:
    """A process that has ended with a code."""

    def __init__(self, code):
        self.code, self.killed = code, False

    def wait(self, seconds=None):
        return self.code

    def kill(self):
        self.killed = True


@pytest.fixture
def started(monkeypatch):
    """The places of the processes that would have been started, of which each ends with a code."""
    places = []

    def start(command, place):
        places.append(place)
        return Ended(started.code)

    def started():
        return places

    started.code = 0
    monkeypatch.setattr(processes, "start", start)
    return started


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("four_threads")
def test_the_threads_and_the_places_are_shared_out(started):
    with processes.sharing_cpu(2, CPU, ["train"]):
        assert torch.get_num_threads() == 2
        here = dict(os.environ)
    assert torch.get_num_threads() == 4
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & {*os.environ}
    (other,) = started()
    assert (here["RANK"], other["RANK"]) == ("0", "1")
    for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"):
        assert here[name] == other[name]
    assert (here["WORLD_SIZE"], here["OMP_NUM_THREADS"]) == ("2", "2")


@pytest.mark.usefixtures("four_threads")
def test_there_are_no_more_than_threads(started):
    with processes.sharing_cpu(9, CPU, ["train"]):
        assert (len(started()), torch.get_num_threads()) == (3, 1)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("device", "place"),
    [
        (torch.device("meta"), {}),
        (CPU, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        (CPU, {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}),
    ],
    ids=["another device", "torchrun, alone", "torchrun"],
)
def test_nothing_is_started_where_others_decide(device, place, started, monkeypatch):
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with processes.sharing_cpu(2, device, ["train"]):
        assert (started(), torch.get_num_threads()) == ([], 4)


def sharing(error=None):
    """Two processes, of which this one ends with an error."""
    with processes.sharing_cpu(2, CPU, ["train"]):
        if error:
            raise error


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("code", "own", "said"), [(3, 3, "exit code 3"), (-9, 1, "signal 9")])
@pytest.mark.parametrize("here", [None, RuntimeError("Connection closed by peer")])
def test_the_failure_of_another_process_is_named(code, own, said, here, started):
    started.code = code
    with pytest.raises(processes.ProcessError, match=f"process 1 of the run .* {said}") as caught:
        sharing(here)
    assert caught.value.exit_code == own


@pytest.mark.usefixtures("four_threads")
def test_an_error_of_this_process_comes_first(started):
    started.code = 1
    with pytest.raises(DataError, match="no images"):
        sharing(DataError("no images"))


@pytest.mark.long
@pytest.mark.usefixtures("four_threads")
def test_two_processes_train_as_one(tmp_path, capfd, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name, words in (("one", ()), ("two", (TWO,))):
        ended = vil("train", *TINY, *EQUAL, *words, "--output_dir", tmp_path / name)
        assert ended.code == 0, ended.err
    assert "ranks 2" in (tmp_path / "two/env.txt").read_text()
    assert capfd.readouterr().err == "", "what the other process said"
    one, two = (load_file(checkpoint(tmp_path / n) / "model.safetensors") for n in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    ours, theirs = (metrics(tmp_path / name, "train") for name in ("two", "one"))
    assert [a["loss"] for a in ours] == pytest.approx([b["loss"] for b in theirs], rel=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("four_threads")
def test_a_mistake_is_one_line(tmp_path, capfd):
    ended = vil("train", *TINY, TWO, "DATALOADER.BSZ=15", "--output_dir", tmp_path / "run")
    assert ended.code == 2
    said = (ended.err + capfd.readouterr().err).splitlines()
    ours = [line for line in said if "BSZ 15 does not divide by the 2 processes" in line]
    assert said == ours, "nothing else is said"
    assert not (tmp_path / "run").exists()
