"""Workflows that commands and notebooks call: train, evaluate, predict and others.

A workflow takes a config, or the arguments to make one, and returns Python objects. It prints
nothing, and raises the exceptions of `vil.errors`.
"""
