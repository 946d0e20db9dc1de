"""Decoders, and the folders that they are loaded from."""
