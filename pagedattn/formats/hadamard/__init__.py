"""A rotation that spreads a row's elements: signs drawn at random, then Hadamard matrices over blocks of the row."""
