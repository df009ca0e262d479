"""Fields of OpenAI's and vLLM's requests that are none of ours, request by request.

Tolerated ones change nothing in the answer and are taken with any value. Unsupported ones are known and not built: they
are taken with the values that ask for nothing, and refused by name with any other.
"""

from typing import Any, Final

from gateway.validation import FieldRules

_UNSUPPORTED_ANYWHERE: Final[dict[str, tuple[Any, ...]]] = {
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}

COMPLETION_RULES: Final = FieldRules(
    tolerated=frozenset({"user"}),
    unsupported={
        **_UNSUPPORTED_ANYWHERE,
        "suffix": ("",),
    },
)
CHAT_RULES: Final = FieldRules(
    tolerated=frozenset({"user", "store", "metadata", "safety_identifier", "prompt_cache_key"}),
    unsupported={
        **_UNSUPPORTED_ANYWHERE,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    },
)
FORMAT_RULES: Final = FieldRules(tolerated=frozenset(), unsupported={})
STRUCTURE_RULES: Final = FieldRules(
    tolerated=frozenset(),
    unsupported={
        "disable_fallback": (False,),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    },
)
MESSAGE_RULES: Final = FieldRules(
    tolerated=frozenset(),
    unsupported={
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
    },
)
TOKENIZE_RULES: Final = FieldRules(
    tolerated=frozenset(),
    unsupported={
        "return_token_strs": (False,),
        "continue_final_message": (False,),
        "chat_template": (),
        "tools": ([],),
    },
)
DETOKENIZE_RULES: Final = FieldRules(tolerated=frozenset(), unsupported={})
