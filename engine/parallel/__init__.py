"""Tensor parallelism on one host: a process per rank, driven over sockets by the engine's own process."""
