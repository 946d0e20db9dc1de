"""4-bit keys in steps of each channel of a block, 4-bit rotated values; blocks are stored once they are full."""
