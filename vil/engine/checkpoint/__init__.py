"""Checkpoints: their content, their schedule and their verification."""
