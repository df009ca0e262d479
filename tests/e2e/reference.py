"""What Hugging Face transformers generates: the tokens that everything else is compared with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


@dataclass(frozen=True)
class Reference:
    """Greedy continuation of one prompt. `token_ids` includes the EOS id if there is one at the end.

    `margin`: the smallest lead of a chosen token's logit over the next best. Float32 sums in another order differ by
    about 1e-4, so a greater margin makes the comparison a proof and not luck.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    margin: float


class ReferenceModel:
    """Batch size 1, float32, KV cache on."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompt: Sequence[int], max_tokens: int, suppress: Sequence[int] = ()) -> Reference:
        """Greedy tokens, none of them in `suppress`."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
                suppress_tokens=list(suppress) or None,
                output_scores=True,
                return_dict_in_generate=True,
            )
        token_ids = output.sequences[0, len(prompt) :].tolist()
        leads = [row[0].topk(2).values for row in output.scores]
        return Reference(
            token_ids,
            self.tokenizer.decode(token_ids, skip_special_tokens=True),
            "stop" if token_ids[-1] in self._eos_token_ids else "length",
            min(float(best - second) for best, second in leads),
        )

    @property
    def _eos_token_ids(self) -> list[int]:
        ids = self._model.generation_config.eos_token_id
        return ids if isinstance(ids, list) else [ids]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use `count` threads meanwhile. With others on the same cores, a second one is mostly waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
