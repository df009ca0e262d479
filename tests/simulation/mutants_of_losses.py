"""Bugs in what finds frames that are damaged or lost, and sends them again."""

from tests.simulation.mutation import Mutation

IN_LOSSES = (
    Mutation(
        "checksum-not-compared",
        "a damaged frame passes for a sound one",
        "kvtransfer.intake:FrameIntake.take",
        "if is_intact(header, body):",
        "if True:",
    ),
    Mutation(
        "splice-before-the-check",
        "a frame is in the pool before its checksum has been looked at",
        "kvtransfer.intake:FrameIntake.take",
        "    if is_intact(header, body):",
        "    self._sink.splice(stream.key, header, body)\n    if is_intact(header, body):",
    ),
    Mutation(
        "damage-not-counted",
        "nobody learns that frames were damaged",
        "kvtransfer.intake:FrameIntake.take",
        "self.counts.num_corrupt += 1",
        "pass",
    ),
    Mutation(
        "damage-not-settled",
        "the bytes of a damaged frame stay in flight",
        "kvtransfer.intake:FrameIntake.take",
        "stream.settle(0, num_bytes)",
        "pass",
    ),
    Mutation(
        "losses-not-settled",
        "bytes that were lost stay in flight",
        "kvtransfer.stream:IncomingStream.settle",
        "lost + num_bytes",
        "num_bytes",
    ),
    Mutation(
        "frames-not-checked",
        "a frame is taken although the one before it was lost",
        "kvtransfer.stream:IncomingStream._judge_layer",
        "return Verdict.NEXT if header.start == self._next[index] else Verdict.GAP",
        "return Verdict.NEXT",
    ),
    Mutation(
        "together-judged-by-the-first",
        "of layers that come in one frame only the first is checked",
        "kvtransfer.stream:IncomingStream.judge",
        "for layer in header.layers}",
        "for layer in header.layers[:1]}",
    ),
    Mutation(
        "asked-from-one-later",
        "the first missing token is not asked for",
        "kvtransfer.stream:IncomingStream.ask_again",
        "start=self._next[index],",
        "start=min(self._next[index] + 1, self.num_tokens),",
    ),
    Mutation(
        "last-loss-unnoticed",
        "what is missing behind the last frame is not asked for",
        "kvtransfer.intake:FrameIntake.on_first_token",
        "self._ask_again(stream, stream.missing_layers(message.num_resends))",
        "pass",
    ),
    Mutation(
        "not-sent-again",
        "what was asked for again is not sent",
        "kvtransfer.outgoing:OutgoingTransfer.resend",
        "self._shipped[layer], self._resends[layer] = start, number",
        "self._resends[layer] = number",
    ),
    Mutation(
        "answer-not-numbered",
        "what is sent again looks like what was sent before",
        "kvtransfer.frames:FrameMaker.header",
        "resend=transfer.resend_of(layer)",
        "resend=0",
    ),
    Mutation(
        "lost-question-not-repeated",
        "a KvResend that was lost is not said again",
        "kvtransfer.intake:FrameIntake.on_repeated_offer",
        "for resend in stream.unheard_resends(offer.num_resends):",
        "for resend in ():",
    ),
)
