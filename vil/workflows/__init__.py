"""What a command or a notebook calls: train, evaluate, predict and the other workflows.

A workflow parses nothing and prints nothing: it takes a config, or what `vil.config` makes one of,
and returns objects. Errors are exceptions of `vil.errors`, with the text that a command prints.
"""
