"""Prefill workers: prompts in, KV and a first token out."""
