"""A model whose every token depends on all tokens before it, and whose KV says whose it is.

    digest[i] = BLAKE2b(digest[i - 1], token[i])                 so it names the whole prefix
    KV of layer l at token i = digest[i], marked with l          K is its first half, V its second
    next token = BLAKE2b(digest[last], seed, choice)             and now and then the end of the text

So a wrong continuation shows in the tokens, and a swapped, stale, missing or misplaced block when it is read.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvtransfer.request_parts import EndReason, SamplingParams, TokenLogprob

EOS = 1
FIRST_TEXT_TOKEN = 2
VOCAB_SIZE = 4096
ENTRY_BYTES = 16  # K and V of one token and layer
HALF = ENTRY_BYTES // 2
EOS_ONE_IN = 23


class HashModel:
    """Digests are kept: a prefix is hashed once in a world, whoever computes it."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._digests: dict[tuple[bytes, int], bytes] = {}
        self._marks = [bytes([layer + 1]) for layer in range(num_layers)]

    def digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """One for each token."""
        digest, found = b"", []
        for token_id in token_ids:
            digest = self._digest(digest, token_id)
            found.append(digest)
        return found

    def _digest(self, before: bytes, token_id: int) -> bytes:
        known = self._digests.get((before, token_id))
        if known is None:
            content = before + struct.pack("<i", token_id)
            known = hashlib.blake2b(content, digest_size=ENTRY_BYTES - 2).digest()
            self._digests[before, token_id] = known
        return known

    def entry(self, layer: int, digest: bytes) -> bytes:
        """KV of one token and layer: K and V each begin with the layer's mark."""
        mark = self._marks[layer]
        return mark + digest[: HALF - 1] + mark + digest[HALF - 1 :]

    def next_token(self, digest: bytes, sampling: SamplingParams) -> int:
        """The token behind the prefix that `digest` names."""
        key = struct.pack("<qI", sampling.seed, sampling.choice_index)
        drawn = hashlib.blake2b(digest + key, digest_size=8).digest()
        number = int.from_bytes(drawn, "little")
        if number % EOS_ONE_IN == 0:
            return EOS
        return FIRST_TEXT_TOKEN + (number >> 8) % (VOCAB_SIZE - FIRST_TEXT_TOKEN)

    def likelihood(self, digest: bytes, token_id: int) -> TokenLogprob:
        """How likely `token_id` is behind the prefix that `digest` names."""
        drawn = hashlib.blake2b(digest + struct.pack("<i", token_id), digest_size=8, person=b"likely").digest()
        rank = 1 + int.from_bytes(drawn, "little") % VOCAB_SIZE
        return TokenLogprob(-rank / VOCAB_SIZE, rank)

    def likelihoods(self, token_ids: Sequence[int], start: int) -> list[TokenLogprob]:
        """Of all tokens from `start` on, which is not the first."""
        digests = self.digests(token_ids)
        return [self.likelihood(digests[place - 1], token_ids[place]) for place in range(start, len(token_ids))]

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], EndReason]:
        """What a client must get: written straight down, with none of the server's code."""
        tokens: list[int] = []
        stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
        while True:
            tokens.append(self.next_token(self.digests([*prompt, *tokens])[-1], sampling))
            if len(tokens) >= sampling.min_tokens and tokens[-1] in stops:
                return tokens, EndReason.STOP
            if len(tokens) == sampling.max_tokens:
                return tokens, EndReason.LENGTH
