"""Workflows that commands and notebooks call: train, evaluate, predict and others.

A workflow takes a config, or the arguments to make one, and returns objects. It parses no command
line and prints nothing. It raises the exceptions of `vil.errors`, whose messages commands print.
"""
