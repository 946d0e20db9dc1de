"""What runs in a step: queues, the token budget, and the loops that run steps."""
