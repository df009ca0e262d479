"""Bugs that nothing comes of as long as another guard stands: the simulation is not asked to find them.

Each is a second line of defence; what holds instead is in brackets. They are planted all the same: one that is found
has become a first line, and belongs into another list.
"""

from tests.simulation.mutation import Mutation

SECOND_LINES = (
    Mutation(
        "no-abort-to-decode",
        "decode is not told that a request has failed (the gateway cancels it there as well)",
        "kvtransfer.send_machine:SendMachine._give_up",
        "if tell_peer and self._book.find(key):",
        "if False:",
    ),
    Mutation(
        "old-link-to-new-decode",
        "KV is offered to whoever sits behind the address now (it expects none, and takes none)",
        "kvtransfer.targets:TargetBook.welcomed",
        "welcome.generation != known.target.generation",
        "False",
    ),
    Mutation(
        "former-transfers-kept",
        "what was offered on a link that is gone is waited for (prefill says that it failed, and the gateway cancels)",
        "kvtransfer.receive_machine:ReceiveMachine._on_hello",
        "self._end_former_transfers((hello.worker_id, hello.generation), link)",
        "pass",
    ),
    Mutation(
        "late-welcome-taken",
        "a worker takes the Welcome to a former introduction (the counts of messages do not fit, and it begins anew)",
        "kvtransfer.gateway_link:GatewayLink.welcome",
        "message.introduction != self.introduction",
        "False",
    ),
    Mutation(
        "other-epoch-taken",
        "a worker does not mind that the gateway is another (which does not know it, and says so)",
        "kvtransfer.gateway_link:GatewayLink.loss_by",
        "if epoch != self.epoch:",
        "if False:",
    ),
    Mutation(
        "old-generation-heard",
        "words of a worker's former life count (they come before the new one's Hello, or with a wrong number)",
        "gateway.cluster:Cluster.receive",
        "worker is None or worker.generation != message.generation",
        "worker is None",
    ),
    Mutation(
        "end-before-token-zero",
        "decode's end counts before prefill's token is here (decode says that one again)",
        "gateway.attempt:Attempt.finish",
        "self.merge.length < self._num_final",
        "False",
    ),
    Mutation(
        "first-token-not-repeated",
        "the first token does not follow what is sent again (it follows the next repeated grant)",
        "kvtransfer.outgoing:OutgoingTransfer.resend",
        "self.first_token_sent = False",
        "pass",
    ),
    Mutation(
        "silence-not-noticed",
        "prefill waits for ever for a decode worker that says nothing (decode's own lease, or the gateway, ends it)",
        "kvtransfer.send_machine:SendMachine._keep_alive",
        "self._end_the_silent(now)",
        "pass",
    ),
    Mutation(
        "broken-link-kept",
        "a link that decode has lost track of is used on (which is rare, and then its transfers are silent, and fail)",
        "kvtransfer.targets:TargetBook.refused",
        "self.drop(name, reason)\n        return",
        "return",
    ),
    Mutation(
        "resend-number-not-compared",
        "what was sent before the question is taken for the answer (its tokens tell; it costs repetitions only)",
        "kvtransfer.stream:IncomingStream._judge_layer",
        "if header.resend < resend:",
        "if False:",
    ),
    Mutation(
        "gap-not-asked",
        "what was lost is not asked for where the gap shows (the first token asks)",
        "kvtransfer.intake:FrameIntake._take_intact",
        "if verdict is Verdict.GAP:",
        "if False:",
    ),
)
