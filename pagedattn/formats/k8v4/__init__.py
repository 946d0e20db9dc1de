"""8-bit keys and 4-bit values, with a scale of each token and head."""
