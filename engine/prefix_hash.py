"""Names for what a KV block holds, so that equal prompts can share blocks. Knows no pool, torch or socket.

The KV of a token depends on all tokens before it, so a block's name chains over its parent's:

    root = H(tagged extras)        name[i] = H(name[i - 1], token ids of block i)        full blocks only

Extras are whatever else the KV depends on, or must not be shared over (a tenant's salt, an adapter). Each goes in with
its tag and its length, so that no two different sets of extras give the same bytes.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Protocol

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


class Tokens(Protocol):
    """A sequence of token ids that only ever grows."""

    def token_slice(self, start: int, stop: int) -> Sequence[int]: ...


class BlockNames:
    """The names of a growing sequence's full blocks, each computed once."""

    def __init__(self, extras: Mapping[str, str], block_size: int) -> None:
        self._block_size = block_size
        self._root = root_name(extras)
        self._names: list[BlockName] = []

    def copy(self) -> "BlockNames":
        """For a sequence that has been the same so far."""
        twin = copy(self)
        twin._names = list(self._names)
        return twin

    def of(self, tokens: Tokens, num_blocks: int) -> Sequence[BlockName]:
        """Names of the first `num_blocks` blocks, which must be full, and of all that were asked for before."""
        size = self._block_size
        for index in range(len(self._names), num_blocks):
            parent = self._names[-1] if self._names else self._root
            token_ids = tokens.token_slice(index * size, (index + 1) * size)
            assert len(token_ids) == size, f"block {index} holds {len(token_ids)} tokens of {size}"
            self._names.append(_child_name(parent, token_ids))
        return self._names


def _child_name(parent: BlockName, token_ids: Sequence[int]) -> BlockName:
    digest = hashlib.blake2b(parent, digest_size=_NAME_BYTES, person=b"kvsplice block")
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return digest.digest()
