"""8-bit floats, e4m3 or e5m2, with a scale that is given."""
