"""Codes of 1, 2 or 4 bits, several in a byte."""
