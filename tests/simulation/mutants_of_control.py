"""Bugs in the control plane: links, beats and numbers, and the gateway."""

from tests.simulation.mutation import Mutation

IN_CONTROL = (
    Mutation(
        "worker-does-not-beat",
        "a worker forgets its heartbeats",
        "kvtransfer.control:GatewayLinks._beat",
        "self._client.send(link.endpoint, beat)",
        "pass",
    ),
    Mutation(
        "gateway-does-not-beat",
        "a gateway forgets its heartbeats",
        "gateway.cluster:Cluster._due_beats",
        "return tuple(sorted(self._workers))",
        "return ()",
    ),
    Mutation(
        "progress-stands",
        "an idle engine looks as if it hung",
        "kvtransfer.worker:Worker._after_turn",
        "self._progress += 1",
        "pass",
    ),
    Mutation(
        "gateway-loss-ignored",
        "requests of a lost gateway go on",
        "kvtransfer.worker:Worker._on_event",
        "self.role.cancel_all_of(gateway, now)",
        "pass",
    ),
    Mutation(
        "lost-request-unnoticed",
        "a worker does not compare the gateway's count of messages with its own",
        "kvtransfer.gateway_link:GatewayLink.loss_by",
        "if sequence != self.num_taken:",
        "if False:",
    ),
    Mutation(
        "sequence-not-counted",
        "a worker repeats the number of a message",
        "kvtransfer.control:GatewayLinks._send",
        "link.num_sent += 1",
        "pass",
    ),
    Mutation(
        "lost-output-unnoticed",
        "the gateway does not compare a worker's count of messages with its own",
        "gateway.worker:Worker.has_lost",
        "return message.sequence != expected",
        "return False",
    ),
    Mutation(
        "same-introduction",
        "a worker that begins anew does not say so",
        "kvtransfer.gateway_link:GatewayLink.lose",
        "self.introduction += 1",
        "pass",
    ),
    Mutation(
        "unbounded-inbox",
        "requests pile up before an engine that does not take them",
        "kvtransfer.control:GatewayLinks._hand_in",
        "elif self.inbox.backlog >= self.max_pending:",
        "elif False:",
    ),
)

IN_GATEWAY = (
    Mutation(
        "decode-not-cancelled",
        "decode is not told that nobody waits",
        "gateway.flights:Flights._recall",
        "owed = flight.attempt.active_legs",
        "owed = flight.attempt.active_legs[:1]",
    ),
    Mutation(
        "double-end",
        "a request that is over ends once more",
        "gateway.flights:Flights.end",
        "is None:\n        return",
        "is None:\n        pass",
    ),
    Mutation(
        "departure-ignored",
        "requests on a worker that is gone wait on",
        "gateway.flights:Flights.on_departure",
        "if flight.attempt.needs(leg):",
        "if False:",
    ),
    Mutation(
        "restart-unnoticed",
        "a worker that was restarted counts as the one before",
        "gateway.cluster:Cluster._replace",
        'return self.drop(hello.worker_id, "started anew")',
        "return None",
    ),
    Mutation(
        "the-dead-live",
        "silence does not count",
        "gateway.cluster:Cluster.tick",
        "if now - worker.heard_at >= self._settings.dead_after_s",
        "if False",
    ),
    Mutation(
        "booked-for-ever",
        "what has ended stays in the router's book",
        "gateway.flights:Flights._leave",
        "self.book.discard(leg.worker_id, flight.request_id)",
        "pass",
    ),
    Mutation(
        "message-not-counted",
        "the gateway repeats the number of a message",
        "gateway.dispatch:Dispatcher._send",
        "self._cluster.note_sent(worker_id)",
        "pass",
    ),
    Mutation(
        "unbounded-stream",
        "tokens pile up before a slow reader",
        "gateway.flight:TokenStream.push",
        "if self._num_tokens + len(delta.token_ids) > self._limit:",
        "if False:",
    ),
    Mutation(
        "unbounded-flights",
        "more requests are taken than the limit allows",
        "gateway.dispatch:Dispatcher._launch",
        "if self.in_flight + len(flights) > limit:",
        "if False:",
    ),
    Mutation(
        "repeated-token-passes",
        "a token that both workers say reaches the client twice",
        "gateway.merge:TokenMerge._place",
        "if index < num_known:",
        "if index < num_known - 1:",
    ),
)

IN_FAILOVER = (
    Mutation(
        "attempt-number-reused",
        "the second attempt goes by the name of the first",
        "gateway.flight:Flight._next_spec",
        "self.num_attempts",
        "0",
    ),
    Mutation(
        "stream-begins-anew",
        "the client gets tokens again that it has had from the first attempt",
        "gateway.flight:Flight.receive",
        "self.num_streamed += len(fresh)",
        "self.num_streamed = len(fresh)",
    ),
    Mutation(
        "first-attempt-goes-on",
        "the workers of an attempt that is over are not told",
        "gateway.flights:Flights._set_back",
        "self._recall(flight)",
        "pass",
    ),
    Mutation(
        "resumed-said-from-zero",
        "prefill's token of a resumed request is said to be the first one",
        "prefill.scheduler:PrefillScheduler._say",
        "start=request.num_resumed",
        "start=0",
    ),
    Mutation(
        "resumed-from-the-prompt",
        "the output of the first attempt is neither computed nor shipped",
        "engine.request:Request.num_prefill",
        "self.num_prompt + self.num_resumed",
        "self.num_prompt",
    ),
    Mutation(
        "given-up-at-once",
        "a request that has lost a worker is not tried again",
        "gateway.failover:Failover.on_setback",
        "self.num_retries >= self.settings.max_retries",
        "True",
    ),
    Mutation(
        "old-attempt-heard",
        "words of an attempt that is over count",
        "gateway.flights:Flights._find",
        "flight.attempt.spec.attempt != output.attempt",
        "False",
    ),
)
