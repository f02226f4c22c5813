"""Ways to compute local attention; `vil.ops.dispatch` lists them and what they cannot do."""
