"""Attention of few new tokens per sequence, whose keys are split over the whole GPU."""
