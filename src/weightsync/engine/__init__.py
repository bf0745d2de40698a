"""What serves: the worker that loads, and the gate before generations."""
