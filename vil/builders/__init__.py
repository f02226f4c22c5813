"""Builders of the objects that every task needs: model, data loaders, optimizer, process group.

Only this package, the tasks, `vil.workflows` and `vil.cli` read a config. All other code takes
explicit arguments.
"""
