"""--fast: evaluation and prediction with a model that is optimized for inference."""

import json

import numpy as np
import pytest

import vil
from tests.common.marks import cases
from tests.common.small_runs import succeeds
from tests.common.small_runs import vil as command
from tests.common.small_tasks import IMAGE_TASKS, SMALL_TASKS
from vil.integrations.optimize import OptimizedModel
from vil.pretrained.catalog import DIGITS

WEIGHTS = str(DIGITS.url)


@pytest.fixture(scope="module", params=IMAGE_TASKS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings = [*SMALL_TASKS[request.param], "OPTIM.EPOCHS=1"]
    vil.train(None, settings, output_dir=folder)
    return folder


@pytest.mark.long
def test_the_metrics_are_those_of_the_model(run):
    (plain,), (fast,) = (
        vil.evaluate(run, {"EVAL.FAST": value}).values() for value in (False, True)
    )
    numbers = [key for key, value in plain.items() if isinstance(value, int | float)]
    assert {key: fast[key] for key in numbers} == pytest.approx(
        {key: plain[key] for key in numbers}, rel=1e-4, abs=1e-4, nan_ok=True
    )


@pytest.mark.long
def test_commands_have_the_flag(tmp_path):
    words = ["MODEL.MODEL_PATH", WEIGHTS, "DATA.TEST", "digits", "OUTPUT_DIR", str(tmp_path)]
    shown = succeeds("evaluate", *words, "--fast")
    assert "optimized for inference in float32" in shown
    assert "top1 98.06" in shown
    done = command("predict", "--sample", "--fast", "--top", "1", "AMP.ENABLED", "True")
    assert done.code == 0
    assert "optimized for inference in bfloat16" in done.err


@pytest.mark.long
def test_python_has_the_key():
    model = vil.load_for_inference(WEIGHTS, {"EVAL.FAST": True})
    assert isinstance(model.model, OptimizedModel)
    plain = vil.load_for_inference(WEIGHTS)
    image = vil.data.DATASETS.load("digits")(None, "val").image(0)
    (one,), (two,) = (list(vil.predict(m, [image])) for m in (model, plain))
    assert json.dumps(one.classes[0][0]) == json.dumps(two.classes[0][0])


@pytest.mark.parametrize("arch", cases(["msvit", "resnet18"], long=["resnet18"]))
def test_features_are_those_of_the_model(arch, run, tmp_path):
    source = run
    if arch != "msvit":
        source = tmp_path / "run"
        words = [f"MODEL.ARCH={arch}", *SMALL_TASKS["classification"], "OPTIM.EPOCHS=1"]
        vil.train(None, words, output_dir=source)
    image = vil.data.DATASETS.load("digits")(None, "val").image(0)
    plain, fast = (vil.embed(source, image, {"EVAL.FAST": value}) for value in (False, True))
    assert fast.shape == plain.shape
    assert np.allclose(fast, plain, atol=1e-5 * np.abs(plain).max())
