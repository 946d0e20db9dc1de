"""Symmetric 8-bit integers with a scale of each token and head."""
