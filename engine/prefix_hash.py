"""Names for what a KV block holds, so that equal prompts can share blocks. Knows no pool, torch or socket.

The KV of a token depends on all tokens before it, so a block's name chains over its parent's:

    root = H(tagged extras)        name[i] = H(name[i - 1], token ids of block i)        full blocks only

Extras are whatever else the KV depends on, or must not be shared over (a tenant's salt, an adapter). Each goes in with
its tag and its length, so that no two different sets of extras give the same bytes.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence

BlockName = bytes
"""16 bytes: two of 2**40 blocks share a name with probability 2**-49."""

_NAME_BYTES = 16


def root_name(extras: Mapping[str, str]) -> BlockName:
    """The parent of each first block of a prompt with these extras; the order of `extras` does not count."""
    digest = hashlib.blake2b(digest_size=_NAME_BYTES, person=b"kvsplice root")
    for part in (text.encode() for item in sorted(extras.items()) for text in item):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


class BlockNames:
    """The names of a growing sequence's full blocks, each computed once."""

    def __init__(self, extras: Mapping[str, str], block_size: int) -> None:
        self._block_size = block_size
        self._root = root_name(extras)
        self._names: list[BlockName] = []

    def of(self, token_ids: Sequence[int]) -> Sequence[BlockName]:
        """Names of all full blocks of `token_ids`, which only ever grows from one call to the next."""
        size = self._block_size
        for start in range(len(self._names) * size, len(token_ids) - size + 1, size):
            parent = self._names[-1] if self._names else self._root
            self._names.append(_child_name(parent, token_ids[start : start + size]))
        return self._names


def _child_name(parent: BlockName, token_ids: Sequence[int]) -> BlockName:
    digest = hashlib.blake2b(parent, digest_size=_NAME_BYTES, person=b"kvsplice block")
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return digest.digest()
