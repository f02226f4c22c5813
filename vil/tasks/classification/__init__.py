"""One class per image."""
