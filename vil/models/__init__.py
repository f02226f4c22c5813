"""The model, its architecture grammar, weight files and the named models."""
