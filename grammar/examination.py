"""`python -m grammar.examination`: the child of `grammar.examiner`."""

import resource
import signal
import sys

import msgspec

from grammar.child import read_frame, write_frame
from grammar.compiler import compile_grammar
from grammar.errors import CostError, GrammarError
from grammar.examiner import CPU_SECONDS, MEMORY_BYTES, READY, Outfit, Verdict
from grammar.source import lark_of
from grammar.vocabulary import Vocabulary
from kvtransfer.request_parts import Grammar, GrammarKind


def main() -> None:
    """Examines what comes until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    outfit = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Outfit)
    vocabulary = _vocabulary(outfit)
    write_frame(sys.stdout.buffer, READY)
    while True:
        try:
            frame = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict = examine(vocabulary, msgspec.msgpack.decode(frame, type=Grammar))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


def examine(vocabulary: Vocabulary | GrammarError, grammar: Grammar) -> Verdict:
    """What is to be said of one grammar."""
    if isinstance(vocabulary, GrammarError):
        return Verdict(fault=str(vocabulary))
    try:
        text = lark_of(grammar.text) if grammar.kind is GrammarKind.LARK else grammar.text
        compile_grammar(vocabulary, msgspec.structs.replace(grammar, text=text))
    except GrammarError as error:
        return Verdict(fault=str(error), is_costly=isinstance(error, CostError))
    return Verdict(text=text)


def _vocabulary(outfit: Outfit) -> Vocabulary | GrammarError:
    try:
        return Vocabulary(outfit.tokenizer_json, outfit.num_ids, outfit.eos_token_ids)
    except GrammarError as error:
        return error


if __name__ == "__main__":
    main()
