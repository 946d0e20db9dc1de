"""What runs in a step: queues, the token budget, and the loop that runs steps."""
