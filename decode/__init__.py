"""Decode workers: KV and a first token in, the other tokens out."""
