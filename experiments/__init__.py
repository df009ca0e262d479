"""Benchmarks and experiments. May import everything; nothing imports it."""
