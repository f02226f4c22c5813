"""Checkpoints: what is saved, when, and how it is verified."""
