"""The noise of a draw, a pure function of (seed, prompt ids, choice index, position). Knows no torch and no batch.

    digest = BLAKE2b(seed, choice index, prompt ids)      once a request
    key    = BLAKE2b keyed by digest (position)           once a token; starts the numbers of kernels.sampling.race

A generator object would carry state that preemption, failover and resume had to rebuild. A keyed hash carries none:
whoever knows the request's tokens draws the same token, and two prompts that share a seed share no noise.
"""

import hashlib
import struct

from kvtransfer.request_parts import RequestSpec


def noise_key(spec: RequestSpec) -> bytes:
    """The 32-byte key of all draws of one request."""
    sampling = spec.sampling
    digest = hashlib.blake2b(digest_size=32, person=b"kvsplice draw")
    digest.update(struct.pack("<qI", sampling.seed, sampling.choice_index))
    digest.update(struct.pack(f"<{len(spec.prompt_token_ids)}I", *spec.prompt_token_ids))
    return digest.digest()


def draw_key(key: bytes, position: int) -> int:
    """64 bits, as a signed integer, for the output token at `position` (0 is the first one); `key` of `noise_key`."""
    digest = hashlib.blake2b(struct.pack("<Q", position), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
