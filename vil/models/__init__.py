"""The model, its architecture grammar, the named architectures and attention maps."""
