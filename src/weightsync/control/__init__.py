"""When to sync: a pure state machine, and the I/O around it. Imports no torch."""
