"""The noise of a draw, a pure function of (seed, prompt ids, choice index, position). Knows no torch and no batch.

    digest  = BLAKE2b(seed, choice index, prompt ids)        once a request
    uniform = BLAKE2b keyed by digest (position) -> [0, 1)   once a token

A generator object would carry state that preemption, failover and resume had to rebuild. A keyed hash carries none:
whoever knows the request's tokens draws the same token, and two prompts that share a seed share no noise.
"""

import hashlib
import struct

from kvtransfer.messages import RequestSpec

_MANTISSA_BITS = 53
"""A float64 holds every integer of this many bits, so the uniforms are exact multiples of 2**-53."""


def noise_key(spec: RequestSpec) -> bytes:
    """The 32-byte key of all draws of one request."""
    sampling = spec.sampling
    digest = hashlib.blake2b(digest_size=32, person=b"kvsplice draw")
    digest.update(struct.pack("<qI", sampling.seed, sampling.choice_index))
    digest.update(struct.pack(f"<{len(spec.prompt_token_ids)}I", *spec.prompt_token_ids))
    return digest.digest()


def uniform(key: bytes, position: int) -> float:
    """A number in [0, 1) for the output token at `position` (0 is the first one)."""
    digest = hashlib.blake2b(struct.pack("<Q", position), key=key, digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) / float(1 << _MANTISSA_BITS)
