"""The paged KV cache: blocks, their contents, tables, and what a layer stores."""
