"""Our push and publish behind interfaces of others, thin: nothing is implemented twice here."""
