"""Modules that cannot be followed, such as a sparse dispatch over experts, and what they call."""
