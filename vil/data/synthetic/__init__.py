"""Rendered images with known objects."""
