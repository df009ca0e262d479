"""Which choices of a prompt are the best: those with the highest log probability per token, as in OpenAI's `best_of`.

    score = sum of the log probabilities of a choice's tokens / their number

The log probabilities are what answers tell: of the model's raw logits. Tokens are those that an answer would tell: the
one that ends the choice is among them, and what lies behind a stop string is not.
"""

from collections.abc import Sequence
from dataclasses import replace

from gateway.choice_text import TextDelta
from kvtransfer.request_parts import MIN_LOGPROB


def best_of(choices: Sequence[TextDelta], num_kept: int) -> list[TextDelta]:
    """The best `num_kept`, the best one first; of equal ones the earlier comes first. Each is a whole choice."""
    return sorted(choices, key=score, reverse=True)[:num_kept]


def score(choice: TextDelta) -> float:
    """Log probability per token. A choice without tokens, which a stop string may leave, comes last."""
    logprobs = [shown.logprob.logprob for shown in choice.tokens if shown.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else MIN_LOGPROB


def numbered(choices: Sequence[TextDelta]) -> list[TextDelta]:
    """The same with indices from 0."""
    return [replace(choice, index=index) for index, choice in enumerate(choices)]
