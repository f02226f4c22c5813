"""Layers: attention modules, position embeddings, patch embedding and the transformer block."""
