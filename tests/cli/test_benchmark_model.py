"""`vil benchmark model`: the rows it measures, and what it writes."""

import csv
import gzip
import json

import pytest
import torch

from tests.common.marks import cases
from tests.common.small_runs import TINY, vil
from vil.config import get_config
from vil.utils.errors import ConfigError
from vil.workflows.benchmark_model import ModelBenchmark, profile_step

WORDS = (*TINY, "SOLVER.WARMUP_EPOCHS=0", "DATALOADER.BSZ=2", "DEVICE=cpu", "--rounds", "1")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark") / "of" / "model"
    ways = ("--ways", "fp32,bf16+nhwc", "--backends", "chunk_handgrad,triton")
    beside = ("--beside", "timm/test_vit2,squeezenet1_1", "--profile")
    ended = vil("benchmark", "model", *WORDS, *ways, *beside, "--out", folder)
    assert ended.code == 0, ended.err
    return folder, ended.out


@pytest.mark.long
def test_every_way_backend_and_other_model_is_a_row(result):
    folder, out = result
    found = json.loads((folder / "model.json").read_text())
    assert found["machine"].keys() >= {"name", "threads", "torch", "date", "command"}
    rows = {(row["model"], row["way"], row["attention"]): row for row in found["rows"]}
    own, others = found["rows"][0]["model"], ("timm/test_vit2", "squeezenet1_1")
    assert [key for key in rows if key[0] == own] == [
        (own, "fp32", rows and found["rows"][0]["attention"]),
        (own, "bf16+nhwc", found["rows"][1]["attention"]),
        (own, "fp32", "chunk_handgrad, pinned"),
        (own, "fp32", "triton"),
    ]
    assert [key[:2] for key in rows if key[0] != own] == [(name, "fp32") for name in others]
    assert "it needs a CUDA device" in rows[own, "fp32", "triton"]["reason"]
    assert "it needs a CUDA device" in out
    for key, row in rows.items():
        if key[2] != "triton":
            assert min(row["evaluation"], row["training"], row["training_mib"]) > 0, key
            first = found["rows"][0]
            assert row["over_training"] == pytest.approx(row["training"] / first["training"])
    with (folder / "model.csv").open() as file:
        assert [line["way"] for line in csv.DictReader(file)] == [key[1] for key in rows]


@pytest.mark.long
def test_the_profile_names_modules_and_writes_traces(result):
    folder, out = result
    for way in ("fp32", "bf16+nhwc"):
        with (folder / f"costs-{way}.csv").open() as file:
            costs = list(csv.DictReader(file))
        assert sum(float(cost["share"]) for cost in costs) == pytest.approx(1)
        ways = {(cost["module"], cost["way"]) for cost in costs}
        for way_of in ("forward", "backward"):
            assert ("stages.0.blocks.*.mlp.fc1", way_of) in ways
            assert ("head", way_of) in ways
        trace = json.loads(gzip.decompress((folder / f"trace-{way}.json.gz").read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "module: stages.0.blocks.*.mlp.fc1" in names
    assert out.count("a training step of") == 2


@pytest.mark.parametrize(
    "name",
    cases(["vil_nano_96", "vil_tiny_128", "vil_tiny_224"], ["vil_tiny_128", "vil_tiny_224"]),
)
def test_recipes_for_photographs_are_measured_without_data(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["DEVICE=cpu", "INPUT.IMAGE_SIZE=32", "DATALOADER.BSZ=2"]
    cfg = get_config(f"own/{name}.yaml", words)
    (row,) = ModelBenchmark(cfg, name, ways=["fp32"], backends=[], rounds=1, out="speed").run()
    assert (row.model, row.reason) == (name, "")
    assert row.training > 0


def test_a_profile_without_times_is_refused(tmp_path, monkeypatch):
    """As on a GPU whose counters this process may not read."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="the profiler recorded no times on cuda: allow"):
        profile_step(
            lambda: model(torch.ones(1, 2)), model, torch.device("cuda"), tmp_path / "trace.json"
        )
