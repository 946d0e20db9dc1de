"""The benchmark: `pagedattn bench`. Installed as `pagedattn.bench`; nothing of the library imports it."""
