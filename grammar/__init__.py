"""What a request may say of the form of its output: grammars, compiled and followed. Gateway and workers share it.

Knows llguidance, the protocol's structs and a tokenizer's JSON; no torch, no socket, no request.
"""
