"""The MsViT model, its ARCH strings, its named architectures and its attention maps."""
