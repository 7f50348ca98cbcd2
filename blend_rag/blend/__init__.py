"""Blending: stored chunk KV at new positions, a few tokens computed again. Knows tensors, never a model library."""
