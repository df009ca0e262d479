"""Converts the default model's GGUF file to an ordinary bfloat16 checkpoint, and checks the result.

    python -m launcher.conversion FILE.gguf TARGET_FOLDER

This is the only place outside the tests that takes a model class from transformers: serving has its own forward.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

ROUND_TRIP: Final = "Größe 3, naïve café; 日本語 🦊\n\tx = [1, 2]"
QUESTION: Final = "What is the capital of France?"


def main(argv: Sequence[str]) -> int:
    source, target = Path(argv[0]), Path(argv[1])
    convert(source, target)
    faults = check(target)
    for fault in faults:
        print(f"kvsplice: the converted checkpoint is wrong: {fault}", file=sys.stderr)
    return 1 if faults else 0


def convert(gguf: Path, target: Path) -> None:
    """Writes weights (bfloat16), configs, tokenizer and chat template to `target`."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # workers may run as another user than the one who fetched


def check(folder: Path) -> list[str]:
    """What is wrong with the checkpoint in `folder`: empty if it is what the serving code and its users expect."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = {
        "architecture": (config.architectures, ["LlamaForCausalLM"]),
        "tied embeddings": (config.tie_word_embeddings, True),
        "dtype": (model.dtype, torch.bfloat16),
        "vocabulary": (len(tokenizer), config.vocab_size),
        "EOS id": ((config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id), (eos,) * 3),
        "chat template": (bool(tokenizer.chat_template), True),
        "round trip of text": (tokenizer.decode(tokenizer(ROUND_TRIP)["input_ids"]), ROUND_TRIP),
    }
    faults = [f"{name} is {found!r}, not {wanted!r}" for name, (found, wanted) in expected.items() if found != wanted]
    answer = _answer(model, tokenizer, QUESTION)
    return faults if "Paris" in answer else [*faults, f"asked {QUESTION!r} it says {answer!r}"]


def _answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer to `question`, special tokens left out."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
