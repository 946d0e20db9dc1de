"""Copies of whole cache blocks."""
