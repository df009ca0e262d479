"""How likely tokens were, as OpenAI's and vLLM's answers say it: plain dicts out of what workers have told.

Alternatives are the most likely tokens. Completions, whose alternatives are a map, have the token itself among them
even if it is not one of these; so has a prompt's token in vLLM's `prompt_logprobs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.choice_text import ShownToken
from gateway.token_texts import TokenTexts
from kvtransfer.request_parts import TokenLogprob

Json = dict[str, Any]


@dataclass(frozen=True)
class LogprobStyle:
    """What a call asks for: alternatives to each token of the answer and of the prompt, None where it asks for nothing.
    `as_ids`: tokens are called `token_id:5`."""

    texts: TokenTexts
    num_top: int | None = None
    num_prompt_top: int | None = None
    as_ids: bool = False

    def of_completion(self, tokens: Sequence[ShownToken]) -> Json | None:
        """OpenAI's `logprobs` of a completion choice; the first token of a prompt has none."""
        if self.num_top is None:
            return None
        return {
            "text_offset": [shown.offset for shown in tokens],
            "token_logprobs": [None if shown.logprob is None else shown.logprob.logprob for shown in tokens],
            "tokens": [self._name(shown.token_id) for shown in tokens],
            "top_logprobs": [
                None if shown.logprob is None else self._named_top(shown.token_id, shown.logprob) for shown in tokens
            ],
        }

    def of_chat(self, tokens: Sequence[ShownToken]) -> Json | None:
        """OpenAI's `logprobs` of a chat choice."""
        if self.num_top is None:
            return None
        content = [
            {**self._entry(shown.token_id, shown.logprob.logprob), "top_logprobs": self._top_entries(shown.logprob)}
            for shown in tokens
            if shown.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def of_prompt(self, tokens: Sequence[ShownToken]) -> list[Json | None]:
        """vLLM's `prompt_logprobs`: for each token what was likely there, by token id."""
        return [None if shown.logprob is None else self._ranked(shown.token_id, shown.logprob) for shown in tokens]

    def _named_top(self, token_id: int, told: TokenLogprob) -> dict[str, float]:
        named: dict[str, float] = {}
        for found, logprob in (*told.top[: self.num_top], (token_id, told.logprob)):
            named.setdefault(self._name(found), logprob)  # of tokens that look the same the likelier one counts
        return named

    def _top_entries(self, told: TokenLogprob) -> list[Json]:
        return [self._entry(token_id, logprob) for token_id, logprob in told.top[: self.num_top]]

    def _entry(self, token_id: int, logprob: float) -> Json:
        name = f"token_id:{token_id}" if self.as_ids else self.texts.text(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(self.texts.utf8(token_id))}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.texts.name(token_id)

    def _ranked(self, token_id: int, told: TokenLogprob) -> Json:
        ranked = {token_id: (told.rank, told.logprob)}
        for rank, (other, logprob) in enumerate(told.top[: self.num_prompt_top], 1):
            ranked.setdefault(other, (rank, logprob))
        return {
            str(found): {"logprob": logprob, "rank": rank, "decoded_token": self.texts.text(found)}
            for found, (rank, logprob) in ranked.items()
        }
