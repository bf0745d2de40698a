"""Pure functions over shapes: boxes and their overlaps, buckets. No torch, no I/O."""
