"""Shipped test tools: the contract suites. Nothing in the library imports this package."""
