"""Export models as ONNX files, torch.export programs or AOTInductor packages.

export_model(model, "vil.onnx", size=(224, 224))
load_exported("vil.onnx")(images)                      images (B, c, H, W) -> logits (B, K)
quantize_linears("vil.onnx", "vil.int8.onnx")          writes a copy with int8 linear layers

Shapes: B batch, c input channels, H W image size, K classes.
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
