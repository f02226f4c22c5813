"""Export models as ONNX files, torch.export programs or packages of AOTInductor.

export_model(model, "vil.onnx", size=(224, 224))       images (B, c, H, W) -> logits (B, K)
load_exported("vil.onnx")(images)
quantize_linears("vil.onnx", "vil.int8.onnx")          dynamic, or static with calibration images
"""

from vil.utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "export_model": "vil.export.exporter",
        "load_exported": "vil.export.runtime",
        "quantize_linears": "vil.export.quantize",
    },
)
