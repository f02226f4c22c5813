"""Workflows that commands and notebooks call: train, evaluate, predict and others.

A workflow takes a config, or the arguments to make one, and returns Python objects. It parses no
command line and prints nothing. It raises the exceptions of `vil.errors`; the commands in `vil.cli`
print their messages.
"""
