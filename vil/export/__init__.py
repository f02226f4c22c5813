"""Export models as ONNX files or torch.export programs, which other programs can run.

export_model(model, "vil.onnx", size=(224, 224))       images (B, c, H, W) -> logits (B, K)
load_exported("vil.onnx")(images)
quantize_linears("vil.onnx", "vil.int8.onnx")
"""

from vil.utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "export_model": "vil.export.exporter",
        "load_exported": "vil.export.runtime",
        "quantize_linears": "vil.export.onnx",
    },
)
