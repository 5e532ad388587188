"""Known architectures, as data: configurations small enough to check an architecture on the spot."""
