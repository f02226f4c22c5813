"""Checkpoints: what is saved, how it is verified, when."""
