"""Datasets of the registry, concatenation, and lists of images for prediction."""
