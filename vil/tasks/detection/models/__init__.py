"""Models for detection: backbone, feature pyramid, heads, and loading of weights."""
