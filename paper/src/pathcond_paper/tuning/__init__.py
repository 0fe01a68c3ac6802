"""Networks at tuned learning rates: what is compared, how it is trained, and what came of it."""
