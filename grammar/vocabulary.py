"""The tokens of a model as bytes, which is what grammars are followed over."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from grammar.errors import GrammarError, reason_of

FILE_NAME = "tokenizer.json"


class Vocabulary:
    """`tokens` for the library, and `digest`, which two processes must have in common to speak of the same tokens."""

    def __init__(self, tokenizer_json: str, num_ids: int, eos_token_ids: Iterable[int]) -> None:
        """`num_ids`: of the model, which may have more than the tokenizer; those match nothing. Raises GrammarError."""
        eos = sorted(token_id for token_id in eos_token_ids if token_id < num_ids)
        if not eos:
            raise GrammarError("this model has no end token, which an output of a given form needs")
        self.num_ids = num_ids
        self.eos_token_ids = tuple(eos)
        try:
            self.tokens = LLTokenizer(tokenizer_json, n_vocab=num_ids, eos_token=eos)
            self.digest = digest_of(Tokenizer.from_str(tokenizer_json))
        except Exception as error:  # both libraries raise bare exceptions
            raise GrammarError(
                f"this model's tokenizer can't be used for structured output: {reason_of(str(error))}"
            ) from error

    @classmethod
    def of_folder(cls, path: Path, num_ids: int, eos_token_ids: Iterable[int]) -> "Vocabulary":
        """That of a checkpoint folder. Raises GrammarError."""
        return cls(read_tokenizer(path), num_ids, eos_token_ids)


def read_tokenizer(path: Path) -> str:
    """The text of a checkpoint's tokenizer.json. Raises GrammarError."""
    try:
        return (path / FILE_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"this model has no readable {FILE_NAME}, which structured output needs") from error


def digest_of(tokenizer: Tokenizer) -> str:
    """Names the tokens and their ids, without those that were added later: these match nothing by their text."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvsplice vocab")
    for token, token_id in sorted(tokenizer.get_vocab(with_added_tokens=False).items()):
        digest.update(f"{token_id}:{len(token)}:{token}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
