"""Slots of new tokens from block tables."""
