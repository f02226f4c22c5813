"""Rendered scenes with known objects, for object detection."""
