"""What crosses a process boundary: messages, sockets, and the KV hand-over between prefill and decode."""
