"""Rows of a quantised cache in the dtype of the queries."""
