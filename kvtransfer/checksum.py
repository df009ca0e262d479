"""The checksum of a KV frame: what TCP's own 16 bits, a bad memory module or a middlebox may let through is found."""

import zlib

import msgspec

from kvtransfer.codec import encode
from kvtransfer.kv_messages import KvHeader
from kvtransfer.layout import KvBody


def checksum(header: KvHeader, body: KvBody) -> int:
    """CRC-32 (IEEE 802.3, as in zlib) over the header without its checksum, then K, then V."""
    bare = header if header.checksum is None else msgspec.structs.replace(header, checksum=None)
    return zlib.crc32(body.v, zlib.crc32(body.k, zlib.crc32(encode(bare))))


def is_intact(header: KvHeader, body: KvBody) -> bool:
    """Whether the frame is what was sent, as far as its sender lets us know."""
    return header.checksum is None or header.checksum == checksum(header, body)
