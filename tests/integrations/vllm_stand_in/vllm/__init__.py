"""In place of vLLM where it is not installed: what the library's backend imports of it, as plain as it can be."""
