"""Object stores behind one small interface: immutable objects, conditional puts, ranges. No torch."""
