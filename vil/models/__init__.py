"""The MsViT model, ARCH strings that describe models, named architectures, and attention maps."""
