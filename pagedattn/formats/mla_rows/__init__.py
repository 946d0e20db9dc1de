"""Latent rows (MLA): the latent and the rotated part of a token beside each other, in the dtype of the model."""
