"""What single tokens look like: in answers about log probabilities each stands alone, special ones too."""

from engine.detokenizer import REPLACEMENT
from gateway.tokenizer import Tokenizer

_BYTE_TOKEN_CHARS = 6  # <0xE2>


def _byte_alphabet() -> dict[str, int]:
    """The character that a byte-level vocabulary writes for each byte: printable Latin-1 stands for itself, the others
    for the next ones from U+0100 on (Radford et al. 2019, GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenTexts:
    """Remembers each token that it was asked about, so at most the vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """What it decodes to by itself; U+FFFD for bytes that are no character without others, nothing for ids out of
        the vocabulary."""
        return self._look_up(token_id)[0]

    def utf8(self, token_id: int) -> bytes:
        """Its own bytes, also where they are a part of a character only."""
        return self._look_up(token_id)[1]

    def name(self, token_id: int) -> str:
        """Its text, or its bytes where the text does not tell it from others: `bytes:\\xe2\\x80`."""
        text, utf8 = self._look_up(token_id)
        is_whole = REPLACEMENT not in text or text.encode() == utf8
        return text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            known = self._known[token_id] = (text, self._bytes(token_id, text))
        return known

    def _bytes(self, token_id: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        written = self._tokenizer.token(token_id) or ""
        candidates = [bytes(self._alphabet[char] for char in written)] if self._alphabet.keys() >= set(written) else []
        if len(written) == _BYTE_TOKEN_CHARS and written.startswith("<0x") and written.endswith(">"):
            candidates.append(bytes.fromhex(written[3:5]))
        return next((found for found in candidates if found.decode(errors="replace") == text), text.encode())
