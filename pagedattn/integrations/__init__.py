"""Other libraries' models over the paged cache, one module per library, each imported on first use."""
