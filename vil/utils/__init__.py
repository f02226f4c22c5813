"""Utilities that several packages use."""
