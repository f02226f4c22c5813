"""Checkpoints survive crashes and corruption: what is loaded is what was saved, or an error."""

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.common.toy_engine import CLASSES, DTYPE, toy_model, toy_optimizer, toy_train
from tests.engine.test_early_stopping import scripted
from vil.engine.checkpoint import save_load
from vil.engine.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_HASH,
    find_corruption,
    fingerprint,
    hash_manifest,
)
from vil.engine.checkpoint.model_weights import load_exactly
from vil.engine.checkpoint.save_load import (
    TrainObjects,
    TrainState,
    load,
    newest_valid,
    resolve_link,
    save,
    step_of,
)
from vil.engine.distributed import DistInfo
from vil.optim import build_optimizer, decay_groups
from vil.utils.atomic_write import replace_text
from vil.utils.errors import CheckpointError, DivergedError

pytestmark = pytest.mark.smoke

SCALER = torch.amp.GradScaler("cpu", enabled=False)
FILES = ("model.safetensors", "state.pt", MANIFEST, MANIFEST_HASH)


def trained(seed=0):
    """A toy model after a step, with its optimizer and scaler."""
    model = toy_model()
    optimizer = toy_optimizer(model)
    images = torch.randn(4, 3, 2, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))
    model(images).square().mean().backward()
    optimizer.step()
    return TrainObjects(model, optimizer, SCALER)


def save_steps(folder, *steps, best=None, keep=9):
    objects = trained()
    for step in steps:
        at = best if best in range(step + 1) else None
        state = TrainState(0, 1, 8, 5, "AdamW", step=step, best=float(step), best_step=at)
        save(folder, objects, state, dist=DistInfo(), keep=keep)
    return objects


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_loaded_is_what_was_saved(tmp_path):
    saved, loaded = save_steps(tmp_path, 7), trained(seed=1)
    state = load(newest_valid(tmp_path), loaded)
    assert state == TrainState(0, 1, 8, 5, "AdamW", step=7, best=7.0)
    assert state.epoch == 1
    for ours, theirs in zip(saved.model.parameters(), loaded.model.parameters()):
        assert torch.equal(ours, theirs)
        for key, value in saved.optimizer.state[ours].items():
            assert torch.equal(value, loaded.optimizer.state[theirs][key])


def test_the_optimizer_follows_names_not_places(tmp_path):
    """Another split into groups, settings from the config, and a parameter that is new."""
    model, optimizer, *_ = save_steps(tmp_path, 1)
    groups = decay_groups(reversed(list(model.named_parameters())), 0.3, 0.0, {"1.weight"})
    other = build_optimizer("adamw", groups, lr=0.5)
    saved = torch.load(newest_valid(tmp_path) / "state.pt", weights_only=True)
    assert set(saved["optimizer"]) == {name for name, _ in model.named_parameters()}
    load(newest_valid(tmp_path), TrainObjects(model, other, SCALER))
    assert [group["weight_decay"] for group in other.param_groups] == [0.3, 0.0]
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_shared_and_transposed_weights_are_saved(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias = nn.Parameter(torch.arange(6.0).view(3, 2).t()[1])
    optimizer = build_optimizer("sgd", decay_groups(model.named_parameters(), 0, 0), lr=0.1)
    state = TrainState(0, 1, 8, 5, "AdamW", step=1)
    save(tmp_path, TrainObjects(model, optimizer, SCALER), state, dist=DistInfo(), keep=1)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_exactly(other, newest_valid(tmp_path) / "model.safetensors")
    assert torch.equal(other[1].weight, model[0].weight)
    assert other[0].bias.tolist() == [1, 3, 5]


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


CORRUPTIONS = {
    "truncated": truncate,
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": flip_a_bit,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(tmp_path, file, how):
    save_steps(tmp_path, 1, 2)
    CORRUPTIONS[how](tmp_path / "step-00000002" / file)
    warnings = []
    found = newest_valid(tmp_path, warnings.append)
    assert found.name == "step-00000001"
    assert len(warnings) == 1
    assert "step-00000002 skipped" in warnings[0]


def test_no_checkpoint_is_a_fresh_start_but_only_corrupt_ones_are_an_error(tmp_path):
    assert newest_valid(tmp_path / "never") is None
    save_steps(tmp_path, 1)
    truncate(tmp_path / "step-00000001" / "state.pt")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
        newest_valid(tmp_path, lambda text: None)


def test_a_newer_format_is_refused(tmp_path):
    save_steps(tmp_path, 1)
    file = tmp_path / "step-00000001" / MANIFEST
    replace_text(file, file.read_text().replace('"format": 2', '"format": 3'))
    assert "format 3" in find_corruption(tmp_path / "step-00000001")


class KilledError(BaseException):
    """Simulates SIGKILL: no code catches it."""


@pytest.mark.parametrize("step", [1, 2], ids=["again", "next"])
def test_a_save_killed_at_any_moment_leaves_an_intact_checkpoint(step, tmp_path, monkeypatch):
    """Die at the first, second, .. system call that makes something durable, in a save of the same
    step or of the next one."""
    calls = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}
    deaths = finished = 0
    while not finished:
        folder = tmp_path / str(deaths)
        save_steps(folder, 1, best=1)
        left = deaths

        def mortal(name):
            def call(*args):
                nonlocal left
                if left == 0:
                    raise KilledError
                left -= 1
                return calls[name](*args)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, mortal(name))
            try:
                save_steps(folder, step, best=step)
                finished = True
            except KilledError:
                deaths += 1
        found = newest_valid(folder, pytest.fail)
        assert step_of(found) in (1, step)
        links = [resolve_link(folder, name) for name in ("last", "best")]
        assert step == 1 or all(find_corruption(link) is None for link in links)
        save_steps(folder, 3)
        leftovers = [name for name in names(folder) if name.startswith(".")]
        assert leftovers == []
    assert deaths >= 10


@pytest.mark.defect("B25")
def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, 5, best=2, keep=2)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert resolve_link(tmp_path, "best").name == "step-00000002"
    assert resolve_link(tmp_path, "last").name == "step-00000005"


def test_an_old_checkpoint_that_cannot_be_removed_is_logged_once(tmp_path, monkeypatch):
    def remove(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(save_load, "remove", remove)
    assert toy_train(tmp_path, epochs=6, keep=1).step == 30
    assert resolve_link(tmp_path / "checkpoints", "last").name == "step-00000030"
    log = (tmp_path / "log.txt").read_text()
    assert log.count("step-00000005 cannot be removed: OSError") == 1
    assert "was not written" not in log


def test_a_corrupt_newer_checkpoint_is_replaced_and_no_intact_one_removed(tmp_path):
    save_steps(tmp_path, 1, 9)
    truncate(tmp_path / "step-00000009" / "state.pt")
    save_steps(tmp_path, 2, keep=1)
    assert newest_valid(tmp_path, lambda text: None).name == "step-00000002"
    save_steps(tmp_path, 9, keep=1)
    assert newest_valid(tmp_path, pytest.fail).name == "step-00000009"


def test_a_best_checkpoint_that_cannot_be_written_leaves_the_previous_one(tmp_path, monkeypatch):
    def write(final, files, state, write=save_load.write):
        if state.step == 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(final, files, state)

    monkeypatch.setattr(save_load, "write", write)
    state = toy_train(tmp_path, task=scripted(90, 95, 10, 20, 15), epochs=5, keep=1)
    assert (state.best, state.best_step) == (90, 5)
    assert resolve_link(tmp_path / "checkpoints", "best").name == "step-00000005"
    assert (tmp_path / "checkpoints/step-00000005").is_dir()
    log = (tmp_path / "log.txt").read_text()
    assert "the new best checkpoint could not be written: step-00000005 remains the best" in log
    assert "was deleted" not in log


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    objects, state = trained(), TrainState(0, 1, 8, 5, "AdamW", step=3)
    nn.init.constant_(objects.model[1].bias, float("inf"))
    with pytest.raises(DivergedError, match="not finite"):
        save(tmp_path, objects, state, dist=DistInfo(), keep=1)
    assert names(tmp_path) == []


def test_weights_of_another_model_are_refused_key_by_key(tmp_path):
    save_steps(tmp_path, 1)
    file = tmp_path / "step-00000001" / "model.safetensors"
    other = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Identity(), nn.Linear(16, 4))
    other.append(nn.Linear(16, CLASSES + 1))
    before = other[1].weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_exactly(other, file)
    listed = (
        "missing 3.weight (4, 16)",
        "missing 3.bias (4,)",
        "resized 4.weight: (7, 16) in the file, (8, 16) in the model",
        "resized 4.bias: (7,) in the file, (8,) in the model",
    )
    assert str(caught.value).endswith(f"set to this file. Differences: {'; '.join(listed)}")
    assert torch.equal(other[1].weight, before)


class Payload:
    """Pickles to a call that creates a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (open, (str(self.canary), "w"))


WRITERS = [torch.save, lambda o, file: file.write_bytes(pickle.dumps(o, protocol=2))]


@pytest.mark.defect("B12")
@pytest.mark.parametrize("write", WRITERS, ids=["zip", "pickle"])
def test_a_hostile_state_file_is_refused_and_not_run(tmp_path, write):
    """With a forged manifest, so that the hashes match."""
    objects = save_steps(tmp_path, 1)
    folder, canary = tmp_path / "step-00000001", tmp_path / "canary"
    write({"optimizer": Payload(canary)}, folder / "state.pt")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["state.pt"] = fingerprint(folder / "state.pt")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / MANIFEST_HASH).write_text(hash_manifest(folder))
    with pytest.raises(CheckpointError, match="state.pt cannot be read: it holds pickled objects"):
        load(newest_valid(tmp_path, pytest.fail), objects)
    assert not canary.exists()


@pytest.mark.parametrize("text", ["", "../step-00000001"])
def test_a_pointer_leads_to_a_checkpoint_beside_it_only(tmp_path, text):
    save_steps(tmp_path, 1)
    (tmp_path / "last").write_text(text)
    with pytest.raises(CheckpointError, match="last does not name a checkpoint: delete this file"):
        resolve_link(tmp_path, "last")
    save_steps(tmp_path, 2)
    assert resolve_link(tmp_path, "last").name == "step-00000002"


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path):
    save_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (tmp_path / "secret").write_text("mine")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../secret"] = fingerprint(tmp_path / "secret")
    replace_text(folder / MANIFEST, json.dumps(manifest))
    replace_text(folder / MANIFEST_HASH, hash_manifest(folder))
    assert find_corruption(folder) == "manifest.json names ../secret, which is outside the folder"


@pytest.mark.parametrize("content", [[1], {"state": {"steps": 1}}], ids=str)
def test_a_state_of_another_version_is_refused(tmp_path, content):
    objects = save_steps(tmp_path, 1)
    torch.save(content, tmp_path / "step-00000001/state.pt")
    with pytest.raises(CheckpointError, match="state.pt cannot be read: TypeError: "):
        load(tmp_path / "step-00000001", objects)
