"""Which blocks a request has: lookup, allocation, prefix cache, host memory."""
