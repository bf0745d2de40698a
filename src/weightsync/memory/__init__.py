"""Named shared memory: names, lifecycle, clean-up. No torch."""
