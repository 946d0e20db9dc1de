"""Attention in torch, for any device."""
