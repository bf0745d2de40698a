"""Shipped test tools: contract suites, real processes that can be killed, fault injection. Nothing in the
library imports this package."""
