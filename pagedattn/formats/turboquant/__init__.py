"""Rotated rows in the levels that suit normal elements best, 2 to 4 bits each, with a factor of each token and head."""
