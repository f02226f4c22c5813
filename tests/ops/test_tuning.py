"""The tuner checks candidates, selects the fastest, and reads its cache."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.common.backends import restored_backends
from tests.common.marks import cases
from vil.ops import (
    BACKENDS,
    Case,
    Layout,
    LocalBias,
    Window,
    choose,
    explain,
    local_attention,
    patterns,
    register_backend,
)
from vil.ops.dispatch import CHOICES
from vil.ops.testing import make_inputs, run
from vil.ops.tuning import tuner, tuning_cache
from vil.utils.memory import fake_memory
from vil.utils.timing import peak_tensor_bytes

CASE = Case(Window((9, 7), 3), 2, 2, 8, num_global=1, table_bias=True, global_bias=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("VIL_CACHE", str(tmp_path))
    CHOICES.clear()
    with restored_backends():
        yield
    CHOICES.clear()


class Slope(torch.autograd.Function):
    """The identity with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def correct(q, k, v, window, **rest):
    return BACKENDS["chunk_autograd"].attend(q, k, v, window, **rest)


def biased(q, k, v, window, *, bias, **rest):
    table = Slope.apply(bias.table, 1.01)
    return correct(q, k, v, window, bias=LocalBias(table, bias.to_global), **rest)


def a_thousandth_off(q, k, v, window, **rest):
    return correct(q, k, v, window, **rest) * 1.001


def correct_on_small_grids(q, k, v, window, **rest):
    return correct(q, k, v, window, **rest) * (2.0 if window.length > 80 else 1.0)


def not_a_number(q, k, v, window, **rest):
    return correct(q, k, v, window, **rest) / 0.0


def raising(q, k, v, window, **rest):
    raise RuntimeError("no kernel image\nis available")


def too_large(q, k, v, window, **rest):
    if len(q) > tuner.CHECKED_IMAGES:  # passes the checks
        raise MemoryError("no room")
    return correct(q, k, v, window, **rest)


def dropped(q, k, v, window, **rest):
    return correct(q.detach(), k, v, window, **rest)


@pytest.mark.parametrize(
    "dtype", cases([torch.float32, torch.bfloat16], long=[torch.bfloat16]), ids=str
)
@pytest.mark.parametrize(
    ("attend", "complaint"),
    [
        (biased, "wrong: grad of table is off by 1.0e-02"),
        (a_thousandth_off, "wrong: out is off by"),
        pytest.param(not_a_number, "wrong: out is off by inf", marks=pytest.mark.long),
        pytest.param(dropped, "wrong: grad of q is off by 1.0e+00", marks=pytest.mark.long),
        (raising, "failed: RuntimeError: no kernel image"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_candidate_is_caught_and_named(attend, complaint, dtype):
    register_backend("mine", attend)
    trials = tuner.tune(replace(CASE, dtype=dtype), ["mine", "chunk_handgrad"], rounds=1)
    assert [trial.name for trial in trials] == ["chunk_handgrad", "mine"]
    assert trials[1].reason.startswith(complaint)
    assert choose(replace(CASE, dtype=dtype)) == "chunk_handgrad"


def test_a_candidate_that_fails_in_timing_is_rejected():
    register_backend("mine", too_large)
    many = replace(CASE, batch=3)
    trials = tuner.tune(many, ["mine", "masked"], rounds=1)
    assert [trial.name for trial in trials] == ["masked", "mine"]
    assert trials[1].reason == "failed: MemoryError: no room"
    assert choose(many) == "masked"


def test_an_error_on_the_full_grid_only_is_caught(without_native):
    register_backend("mine", correct_on_small_grids)
    large = replace(CASE, window=Window((16, 16), 3))
    (trial,) = tuner.tune(large, ["mine"], rounds=1)
    assert trial.reason.startswith("wrong on the full grid: out differs from chunk_autograd by 1.0")
    assert choose(large) == "blocked"


def test_a_correct_registered_backend_can_be_chosen(without_native):
    register_backend("mine", correct, about="as an example")
    (trial,) = tuner.tune(CASE, ["mine"], rounds=2)
    assert (trial.name, trial.reason) == ("mine", "")
    assert min(trial.forward, trial.backward, trial.bytes) > 0
    assert choose(CASE) == "mine"
    assert explain(CASE)["mine"] == "chosen, tuned"
    assert choose(replace(CASE, head_dim=16)) == "masked", "another bucket is not tuned"


def test_checks_disable_tf32():
    seen = []

    def watching(q, k, v, window, **rest):
        seen.append(torch.get_float32_matmul_precision())
        return correct(q, k, v, window, **rest)

    register_backend("mine", watching)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    tuner.tune(CASE, ["mine"], rounds=1)
    assert {"highest", "high"} == set(seen), "checked exactly, timed as the user computes"
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


@pytest.mark.long
def test_every_backend_is_tried_or_gives_reasons():
    trials = tuner.tune(CASE, rounds=1)
    assert {trial.name for trial in trials} == set(BACKENDS)
    able = [trial for trial in trials if not trial.reason]
    assert trials[: len(able)] == able
    assert able == sorted(able, key=lambda trial: trial.seconds)
    assert "only the exact window" in next(t.reason for t in trials if t.name == "unfold_nnf")


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.parse_pattern("axial | local:1"),
        patterns.from_mask(torch.ones(35, 35, dtype=torch.bool).tril()),  # of this grid only
        pytest.param(
            patterns.from_blocks(torch.eye(6, dtype=torch.bool).expand(3, -1, -1).clone(), 3),
            marks=pytest.mark.long,
        ),
        pytest.param(
            patterns.from_blocks(torch.zeros(6, 6, dtype=torch.bool), 3), marks=pytest.mark.long
        ),
    ],
    ids=["any grid", "one grid", "per head", "no pairs"],
)
def test_the_fastest_backend_of_a_pattern_is_chosen(pattern):
    case = Case(Layout((5, 7), 3, pattern), 2, 3, 4, table_bias=True)
    trials = tuner.tune(case, ["masked", "blocked", "gathered"], rounds=1)
    assert {trial.name: bool(trial.reason) for trial in trials} == {
        "masked": False, "blocked": False, "gathered": True,
    }  # fmt: skip
    assert choose(case) == trials[0].name


def test_an_unknown_name_or_device_raises_before_measuring():
    with pytest.raises(ValueError, match="unknown backend 'blokked'; did you mean 'blocked'"):
        tuner.tune(CASE, ["masked", "blokked"])
    with pytest.raises(ValueError, match="unknown device to measure on 'mps'"):
        tuner.tune(replace(CASE, device="mps"), ["blocked"])
    assert not CHOICES


def test_too_many_bytes_are_a_reason():
    trials = tuner.tune(CASE, ["masked", "blocked"], rounds=1, max_bytes=1000)
    assert all(trial.reason.startswith("needs ") for trial in trials)
    assert not CHOICES


def test_in_evaluation_only_the_forward_pass_counts():
    (trial,) = tuner.tune(replace(CASE, needs_grad=False), ["blocked"], rounds=1)
    assert trial.forward > 0
    assert trial.backward == 0
    with torch.no_grad():
        assert choose(replace(CASE, needs_grad=False)) == "blocked"
    assert list(CHOICES) == [replace(CASE, needs_grad=False).bucket()]


def test_attention_uses_the_choice(monkeypatch):
    taken = []
    register_backend("mine", lambda *args, **rest: taken.append(1) or correct(*args, **rest))
    CHOICES[CASE.bucket()] = "mine"
    inputs = make_inputs(CASE)
    bias = LocalBias(inputs.table, inputs.to_global)
    local_attention(inputs.q, inputs.k, inputs.v, CASE.window, num_global=1, bias=bias)
    assert taken == [1]
    with torch.no_grad():  # evaluation is another bucket
        local_attention(inputs.q, inputs.k, inputs.v, CASE.window, num_global=1, bias=bias)
    assert taken == [1]


def test_a_choice_that_cannot_run_or_does_not_exist_is_not_used(without_native):
    CHOICES[CASE.bucket()] = "unfold_nnf"
    assert choose(CASE) == "masked"
    CHOICES[CASE.bucket()] = "of_yesterday"
    assert choose(CASE) == "masked"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"batch": 1}, False),
        ({"batch": 3}, False),
        ({"head_dim": 16}, False),
        ({"needs_grad": False}, False),
        ({"table_bias": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"window": Window((9, 9), 3)}, True),  # chunks count, not tokens
        ({"window": Window((10, 7), 3)}, False),
        ({"window": Window((9, 7), 3, 1)}, False),
    ],
    ids=str,
)
def test_cases_of_one_bucket(change, same):
    assert (replace(CASE, **change).bucket() == CASE.bucket()) == same


@pytest.mark.parametrize(
    "name",
    cases(["masked", "chunk_autograd", "chunk_handgrad"], ["chunk_autograd", "chunk_handgrad"]),
)
def test_peak_bytes_are_computed_on_fake_tensors(name):
    case = replace(CASE, window=Window((24, 20), 4), head_dim=32)
    with fake_memory() as held:
        inputs = make_inputs(case)
        before = held.now
        run(BACKENDS[name].attend, case, inputs)
    inputs = make_inputs(case)
    measured = peak_tensor_bytes(lambda: run(BACKENDS[name].attend, case, inputs), CPU)
    assert held.peak - before == pytest.approx(measured, rel=0.05)


def test_choices_are_loaded_from_the_file():
    trials = tuner.tune(CASE, ["blocked", "masked"], rounds=1)
    assert tuning_cache.save("cpu", {CASE.bucket(): trials})
    other = replace(CASE, head_dim=16)
    assert tuning_cache.save("cpu", {other.bucket(): [tuner.Trial("gathered", forward=1.0)]})
    kept = dict(CHOICES)
    CHOICES.clear()
    assert tuning_cache.load("cpu") == 2
    assert {**kept, other.bucket(): "gathered"} == CHOICES


def test_choices_that_are_saved_at_the_same_time_are_kept():
    def save(number):
        return tuning_cache.save("cpu", {f"case {number}": [tuner.Trial("masked", forward=1.0)]})

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(save, range(8)))
    assert tuning_cache.load("cpu") == 8


def test_choices_of_another_machine_or_code_are_kept(caplog):
    theirs = {"cpu of another kind": {CASE.bucket(): {"backend": "masked"}}}
    tuning_cache.path().write_text(json.dumps({"format": 1, "machines": theirs}))
    assert tuning_cache.load("cpu") == 0
    assert "has tuned backends, but not for the current machine" in caplog.text
    tuning_cache.save("cpu", {CASE.bucket(): [tuner.Trial("blocked", forward=1.0)]})
    found = json.loads(tuning_cache.path().read_text())["machines"]
    assert found.items() > theirs.items()
    assert len(found) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "machines": {}}',
        '{"format": 1, "machines": {"x": {"y": {"backend": 3}}}}',
        "\x00\x01",
    ],
)
def test_an_invalid_file_is_a_warning(text, caplog):
    tuning_cache.path().write_text(text)
    assert tuning_cache.load("cpu") == 0
    assert "is ignored" in caplog.text
    assert tuning_cache.save("cpu", {CASE.bucket(): [tuner.Trial("blocked", forward=1.0)]})
    assert tuning_cache.load("cpu") == 1


def test_a_path_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VIL_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        trial = tuner.Trial("blocked", forward=1.0)
        assert not tuning_cache.save("cpu", {CASE.bucket(): [trial]})
    assert "cannot write the tuned backends" in caplog.text
    assert tuning_cache.load("cpu") == 0
