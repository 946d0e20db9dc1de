"""Keys and values as they are, in the dtype of the model."""
