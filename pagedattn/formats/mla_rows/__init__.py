"""Latent rows (MLA): the latent and the rotated part of a token beside each other, as they are or in e4m3."""
