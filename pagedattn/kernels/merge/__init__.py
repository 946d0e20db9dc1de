"""Merges of partial attention states."""
