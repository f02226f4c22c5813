"""An ONNX file of a detector finds in onnxruntime what the model finds."""

import json

import pytest
import torch

from tests.common.detection.detectors import detector, pictures
from tests.common.marks import cases
from vil.tasks.detection.export import ExportedDetector, FixedDetector, export_detector

onnxruntime = pytest.importorskip("onnxruntime")
NOTES = {"classes": json.dumps(["cat", "dog", "owl"])}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", cases(["mask_rcnn", "faster_rcnn", "retinanet"], long=["faster_rcnn"])
)
def test_the_file_finds_what_the_model_finds(kind, tmp_path):
    """In the example image and in others, at a size that needs padding."""
    model = detector(kind, rpn_pre_nms_test=4000, rpn_post_nms_test=400).eval()
    with torch.no_grad():  # without scores that are nearly equal
        for parameter in model.rpn.head.cls_logits.parameters() if kind != "retinanet" else ():
            parameter *= 50
    (example,) = pictures((60, 84))
    (difference,) = export_detector(model, tmp_path / "m.onnx", example[None], metadata=NOTES)
    assert difference.largest < 0.01
    fixed, counts = FixedDetector(model, (60, 84)), []
    exported = ExportedDetector(tmp_path / "m.onnx")
    for factor in (1.0, 0.7, 0.3):
        image = factor * example.flip(2)
        with torch.no_grad():
            boxes, labels, scores, *masks = fixed(image[None])
        (found,) = exported([image])
        assert list(found) == ["boxes", "labels", "scores", "masks"][: 3 + len(masks)]
        assert len(masks) == (kind == "mask_rcnn")
        assert sorted(found["labels"].tolist()) == sorted(labels.tolist())
        torch.testing.assert_close(found["scores"], scores, atol=1e-4, rtol=0)
        assert found["boxes"].shape == boxes.shape
        assert all(found["masks"].shape == mask.shape for mask in masks)
        counts.append(len(labels))
    assert max(counts) > 0
    (larger,) = exported([torch.rand(3, 120, 84)])
    assert all(name != "masks" or x.shape[1:] == (1, 120, 84) for name, x in larger.items())
    notes = exported.session.get_modelmeta().custom_metadata_map
    assert (notes["classes"], notes["input_size"]) == (NOTES["classes"], "60x84")
