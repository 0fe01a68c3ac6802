"""What conditioning minimises: energies and weights that criteria give to one convex problem."""
