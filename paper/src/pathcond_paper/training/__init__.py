"""Training many networks at once, stacked, with every method."""
