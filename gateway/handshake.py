"""Whether a worker that introduces itself fits: pure comparisons, each with a text that says what differs."""

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.layout import describe_mismatch
from kvtransfer.link_name import is_of, speaks_for
from kvtransfer.messages import Hello
from kvtransfer.worker_facts import Fingerprint, Role


def identity_fault(sender: str, hello: Hello) -> str | None:
    """What is wrong with an introduction in itself, or None. `sender` is the name of its connection."""
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol version: {hello.protocol} != {PROTOCOL_VERSION}; run the same release everywhere"
    if not is_of(sender, hello.worker_id, hello.generation):
        return "the worker id does not match the name of the connection"
    if (named := _role_named_by(hello.worker_id)) not in (hello.role, None):
        return f"worker id {hello.worker_id} is for a {named.value} worker, this is a {hello.role.value} worker"
    if hello.can_switch and named is not None:
        return f"worker id {hello.worker_id} names a role, and this worker can switch its own: call it otherwise"
    if (hello.role is Role.DECODE) != (hello.kv_endpoint is not None):
        return "decode workers name a KV endpoint, prefill workers do not"
    limits = hello.limits
    if limits.kv_tokens < limits.max_model_len:
        return f"its KV pool holds {limits.kv_tokens} tokens, less than one request of {limits.max_model_len}"
    return None


def _role_named_by(worker_id: str) -> Role | None:
    """The role that an id begins with: a key for workers of one role must not do for another."""
    return next((role for role in Role if speaks_for(role.value, worker_id)), None)


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
