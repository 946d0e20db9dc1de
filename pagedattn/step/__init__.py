"""What one step attends to."""
