"""Decode over caches of 8-bit codes: tensor cores take them from registers, converted on the way."""
