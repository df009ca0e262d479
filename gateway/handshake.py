"""Whether a worker that introduces itself fits: pure comparisons, each with a text that says what differs."""

from kvtransfer.layout import describe_mismatch
from kvtransfer.messages import PROTOCOL_VERSION, Fingerprint, Hello, Role


def identity_fault(sender: str, hello: Hello) -> str | None:
    """What is wrong with an introduction in itself, or None. `sender` is the routing id it came from."""
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol version: {hello.protocol} != {PROTOCOL_VERSION}; run the same release everywhere"
    if hello.worker_id != sender:
        return "the worker id does not match the id of the connection"
    if (hello.role is Role.DECODE) != (hello.kv_endpoint is not None):
        return "decode workers name a KV endpoint, prefill workers do not"
    limits = hello.limits
    if limits.kv_tokens < limits.max_model_len:
        return f"its KV pool holds {limits.kv_tokens} tokens, less than one request of {limits.max_model_len}"
    return None


def vocabulary_fault(fingerprint: Fingerprint, tokenizer_vocab_size: int | None) -> str | None:
    """A model may pad its vocabulary beyond the tokenizer's, never fall short of it."""
    if tokenizer_vocab_size is None or fingerprint.vocab_size >= tokenizer_vocab_size:
        return None
    return (
        f"vocab_size: the model has {fingerprint.vocab_size} tokens, the gateway's tokenizer {tokenizer_vocab_size}; "
        "give both the same --model"
    )


def peer_fault(hello: Hello, peer: Hello) -> str | None:
    """What keeps two workers from exchanging KV: 'differs from decode-0: weights: abc != def; dtype: ...', or None."""
    difference = describe_mismatch(
        (hello.protocol, hello.fingerprint, hello.layout), (peer.protocol, peer.fingerprint, peer.layout)
    )
    return None if difference is None else f"differs from {peer.worker_id}: {difference}"
