"""Places that hold offloaded blocks."""
