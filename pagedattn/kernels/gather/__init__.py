"""Reads of cached rows into packed ones."""
