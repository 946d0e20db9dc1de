"""The attention layer and what a step plans for it."""
