"""The four implementations of the Vision Longformer code of 2021, which ATTN_TYPE selects by name.

They are for comparisons, except `chunk_autograd` (differentiable in every way, and exportable) and
`chunk_handgrad` (the fallback for dropout).
"""
