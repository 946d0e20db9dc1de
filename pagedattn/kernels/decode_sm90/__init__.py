"""Decode over caches of 8- and 4-bit codes, copied a tile ahead and converted in the registers of tensor cores."""
