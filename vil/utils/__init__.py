"""Small modules that several packages use."""
