"""A format that uses every hook: two codes a byte, a channel scale of each sealed block, rotated keys and values."""
