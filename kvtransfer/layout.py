"""Compares what two workers say they are, and cuts token ranges into frames. Pure arithmetic on the messages' types."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvtransfer.codec import PROTOCOL_VERSION, Part
from kvtransfer.errors import ProtocolError
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvHeader
from kvtransfer.worker_facts import Fingerprint, KvLayout

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FP8: Final = "float8_e4m3fn+scales"
"""What KV may be packed into for the wire, whatever pools hold: unlike a float8 pool's numbers it brings its scales."""
_SCALE_BYTES: Final = 4
_MAY_DIFFER = frozenset({"block_size"})
"""Layout fields in which peers may differ: the wire speaks tokens, pools speak blocks."""
_MAX_VALUE_CHARS = 80
"""Of a value that is shown: with all fields different, a reason stays within the bound of `Text`."""


class KvBody(NamedTuple):
    """K and V of one message, as received: read-only bytes, valid as long as this object lives. One a message is made,
    so it has to be cheap."""

    k: memoryview
    v: memoryview


def describe_mismatch(ours: tuple[int, Fingerprint, KvLayout], theirs: tuple[int, Fingerprint, KvLayout]) -> str | None:
    """What keeps two peers from exchanging KV, as 'field: ours != theirs; ...', or None if nothing does.

    Each side is (protocol version, fingerprint, layout).
    """
    (our_protocol, our_fingerprint, our_layout), (their_protocol, their_fingerprint, their_layout) = ours, theirs
    differences = [
        *_differences(our_fingerprint, their_fingerprint, "model "),
        *_differences(our_layout, their_layout, "KV "),
    ]
    if our_protocol != their_protocol:
        differences.insert(0, f"protocol version: {our_protocol} != {their_protocol}")
    return "; ".join(differences) or None


def _differences(ours: Part, theirs: Part, prefix: str) -> Iterator[str]:
    for name in ours.__struct_fields__:
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if our_value != their_value and name not in _MAY_DIFFER:
            yield f"{prefix}{name}: {_shown(our_value)} != {_shown(their_value)}"


def _shown(value: object) -> str:
    return str(value)[:_MAX_VALUE_CHARS]


def head_bytes(layout: KvLayout, dtype: str) -> int:
    """Bytes of K (or V) for one token and one KV head in one layer, as a frame of `dtype` brings it."""
    return layout.head_dim + _SCALE_BYTES if dtype == FP8 else layout.head_dim * _DTYPE_BYTES[dtype]


def max_frame_tokens(token_bytes: int, max_bytes: int = MAX_BODY_BYTES) -> int:
    """Tokens that fit one frame of K (or V), if one takes `token_bytes`. Raises ProtocolError if not even one does."""
    tokens = max_bytes // token_bytes
    if tokens < 1:
        raise ProtocolError(f"one token takes {token_bytes} bytes a layer, a frame holds {max_bytes}")
    return tokens


def check_header(header: KvHeader, k_bytes: int, v_bytes: int, layout: KvLayout) -> None:
    """Raises ProtocolError unless the header is within `layout` and the bodies are as long as it says."""
    if header.layers.stop > layout.num_layers:
        raise ProtocolError(f"layer {header.layers[-1]} of {layout.num_layers}")
    if header.dtype not in (layout.dtype, FP8):
        raise ProtocolError(f"KV of dtype {header.dtype}, this pool holds {layout.dtype}")
    if not header.start < header.stop:
        raise ProtocolError(f"empty token range [{header.start}, {header.stop})")
    if not header.head_start < header.head_stop <= layout.num_kv_heads:
        raise ProtocolError(f"KV heads [{header.head_start}, {header.head_stop}) of {layout.num_kv_heads}")
    expected = header.num_rows * (header.head_stop - header.head_start)
    expected *= head_bytes(layout, header.dtype)
    if not k_bytes == v_bytes == expected <= MAX_BODY_BYTES:
        raise ProtocolError(f"bodies of {k_bytes} and {v_bytes} bytes, the header makes it {expected}")


def our_identity(fingerprint: Fingerprint, layout: KvLayout) -> tuple[int, Fingerprint, KvLayout]:
    """This process's side of `describe_mismatch`."""
    return (PROTOCOL_VERSION, fingerprint, layout)
