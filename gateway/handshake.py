"""Whether a worker that introduces itself fits: pure comparisons, each with a text that says what differs."""

from collections.abc import Iterator

from kvtransfer.messages import PROTOCOL_VERSION, Fingerprint, Hello, KvLayout, Part, Role

_MAX_VALUE_CHARS = 80
"""Of a value that is shown; with all fields different a reason stays within the bound of `Text`."""

_OWN_CHOICES = frozenset({"block_size"})
"""Layout fields that peers need not share: the wire never speaks of blocks."""


def identity_fault(sender: str, hello: Hello) -> str | None:
    """What is wrong with an introduction in itself, or None. `sender` is the routing id it came from."""
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol version: {hello.protocol} != {PROTOCOL_VERSION}; run the same release everywhere"
    if hello.worker_id != sender:
        return "the worker id does not match the id of the connection"
    if (hello.role is Role.DECODE) != (hello.kv_endpoint is not None):
        return "decode workers name a KV endpoint, prefill workers do not"
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
    differences = [
        *_differences(hello.fingerprint, peer.fingerprint, prefix=""),
        *_differences(hello.layout, peer.layout, prefix="KV "),
    ]
    if not differences:
        return None
    return f"differs from {peer.worker_id}: {'; '.join(differences)}"


def _differences(mine: Fingerprint | KvLayout, other: Part, prefix: str) -> Iterator[str]:
    for name in mine.__struct_fields__:
        left, right = getattr(mine, name), getattr(other, name)
        if left != right and name not in _OWN_CHOICES:
            yield f"{prefix}{name}: {_shown(left)} != {_shown(right)}"


def _shown(value: object) -> str:
    return str(value)[:_MAX_VALUE_CHARS]
