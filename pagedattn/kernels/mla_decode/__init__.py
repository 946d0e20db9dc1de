"""Absorbed latent attention (MLA): all heads over one latent row per token, whose keys are split over the whole GPU."""
