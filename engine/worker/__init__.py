"""The execution of a step on a device."""
