"""Which variables a chat template reads, so that what a client sets is never ignored."""

import re
from typing import Final

import jinja2
from jinja2 import meta
from jinja2.defaults import DEFAULT_NAMESPACE

RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"}
)
"""What the server or the tokenizer sets: never a client's."""

_GENERATION_TAG: Final = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def template_variables(template: str) -> frozenset[str]:
    """Names that `template` reads and does not define, without RESERVED and Jinja's own.

    The `generation` tag of transformers has no meaning for names, and plain Jinja does not know it.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(_GENERATION_TAG.sub("", template))
    return frozenset(meta.find_undeclared_variables(tree)).difference(RESERVED, DEFAULT_NAMESPACE)
