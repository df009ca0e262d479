"""Bugs in what workers do: their books, their schedulers, and the KV hand-over between them."""

from tests.simulation.mutation import Mutation

IN_ENGINE = (
    Mutation(
        "skip-the-free",
        "a request that ends does not give its blocks back",
        "engine.request_blocks:RequestBlocks.give_back",
        "self._pool.free(request.block_ids, owner=request.key)",
        "pass",
    ),
    Mutation(
        "scores-from-the-cache",
        "a prompt whose logits are asked for takes KV from the cache",
        "engine.request_blocks:RequestBlocks.find_cached",
        " or request.scores_prompt",
        "",
    ),
    Mutation(
        "free-while-lent",
        "blocks are freed while a transfer still reads or writes them",
        "engine.request_book:RequestBook._end",
        "if request.lent:",
        "if False:",
    ),
    Mutation(
        "ignore-cancel",
        "a worker goes on with what nobody waits for",
        "engine.request_book:RequestBook.cancel",
        "self._end_alone(request, EndReason.CANCELLED, now)",
        "pass",
    ),
    Mutation(
        "cancel-other-gateways",
        "the loss of one gateway cancels the requests of all",
        "engine.request_book:RequestBook.cancel_all_of",
        "if request.gateway == gateway:",
        "if True:",
    ),
    Mutation(
        "unbounded-queue",
        "a full queue takes more",
        "engine.request_book:RequestBook.add",
        "self._num_queued >= self._rules.max_waiting",
        "False",
    ),
    Mutation(
        "one-token-too-many",
        "max_tokens is passed by one",
        "engine.stopping:finish_reason",
        "num_output >= sampling.max_tokens",
        "num_output > sampling.max_tokens",
    ),
    Mutation(
        "stop-before-min-tokens",
        "a stop token ends the text one token too late where min_tokens is set",
        "engine.stopping:finish_reason",
        "num_output >= sampling.min_tokens",
        "num_output > sampling.min_tokens",
    ),
)

IN_SHARING = (
    Mutation(
        "cached-one-more",
        "one token behind the shared blocks is taken for computed",
        "engine.request_blocks:RequestBlocks.take",
        "len(cached) * self._pool.block_size",
        "len(cached) * self._pool.block_size + (1 if cached else 0)",
    ),
    Mutation(
        "shared-and-written",
        "the last block of a prompt is shared although its last token is computed again",
        "prefill.scheduler:PrefillScheduler._admit",
        "self._blocks.find_cached(request, request.num_prefill - 1)",
        "self._blocks.find_cached(request, request.num_prefill)",
    ),
    Mutation(
        "wrong-block-named",
        "another block is said to hold what was computed",
        "engine.request_blocks:RequestBlocks.note_computed",
        "self._pool.name(request.block_ids[index], names[index])",
        "self._pool.name(request.block_ids[0], names[index])",
    ),
    Mutation(
        "name-without-its-head",
        "blocks of equal tokens are shared whatever stands before them",
        "engine.prefix_hash:BlockNames.of",
        "_child_name(parent, token_ids)",
        "_child_name(self._root, token_ids)",
    ),
    Mutation(
        "evicted-and-found",
        "a block that was handed out anew is still found by its old name",
        "engine.block_pool:BlockPool._take",
        "self._forget(block_id)",
        "pass",
    ),
    Mutation(
        "grow-one-late",
        "a request gets its next block a token too late",
        "engine.growing_book:GrowingBook._may_write",
        "(request.num_tokens - 1)",
        "(request.num_tokens - 2)",
    ),
    Mutation(
        "preempted-never-back",
        "a request that has lost its blocks waits for ever",
        "engine.growing_book:GrowingBook._readmit",
        "self._run(request)",
        "pass",
    ),
)

IN_SWAPPING = (
    Mutation(
        "swapped-not-copied-back",
        "KV that was kept on the host is taken for present, and is not",
        "engine.growing_book:GrowingBook._restore",
        "self._moves += moves",
        "pass",
    ),
    Mutation(
        "swapped-back-from-the-second",
        "the first block that the prefix cache lacks is not copied back",
        "engine.swap_space:SwapSpace.restore",
        "[first:]",
        "[first + 1 :]",
    ),
    Mutation(
        "swapped-kept",
        "what comes back, or ends while it is preempted, keeps its blocks on the host",
        "engine.swap_space:SwapSpace.drop",
        "self._pool.free(saved.block_ids, owner=key)",
        "pass",
    ),
)

IN_GROUPS = (
    Mutation(
        "write-to-shared",
        "choices of a prompt write to the block that they share",
        "engine.growing_book:GrowingBook._may_write",
        " and not self._pool.is_shared(request.block_ids[index])",
        "",
    ),
    Mutation(
        "copy-forgotten",
        "a block that replaces a shared one is never filled",
        "decode.worker:DecodeRole._compute",
        "self._engine.kv_cache.copy_blocks(self._scheduler.take_copies())",
        "self._scheduler.take_copies()",
    ),
    Mutation(
        "free-for-all-owners",
        "the first owner that frees a block frees it for all",
        "engine.block_pool:BlockPool.free",
        "holders.remove(owner)",
        "holders.clear()",
    ),
    Mutation(
        "leader-takes-all-along",
        "the choices of a prompt end with the first one",
        "engine.request_book:RequestBook._end_alone",
        "if request.followers:",
        "if False:",
    ),
    Mutation(
        "carrier-never-ends",
        "a leader that nobody waits for goes on when its last follower is gone",
        "engine.request_book:RequestBook._end_alone",
        "if leader is not None and leader.is_over and not leader.followers:",
        "if False:",
    ),
    Mutation(
        "all-draw-the-same",
        "all choices of a prompt draw with the noise of the first one",
        "kvtransfer.messages:Sibling.spec",
        "choice_index=self.choice_index",
        "choice_index=leader.sampling.choice_index",
    ),
)

IN_PREFILL = (
    Mutation(
        "prefill-last-block",
        "no room for the last token of the prompt",
        "prefill.scheduler:PrefillScheduler._admit",
        "self._blocks.take_first(request, request.num_prefill, cached)",
        "self._blocks.take_first(request, request.num_prefill - 1, cached)",
    ),
    Mutation(
        "prefill-keeps-closed",
        "blocks of a cancelled request stay when its transfer has ended",
        "prefill.scheduler:PrefillScheduler.transfer_ended",
        "self._release(request, now)",
        "pass",
    ),
    Mutation(
        "no-first-token-to-decode",
        "decode never gets the first token",
        "prefill.scheduler:PrefillScheduler._sampled",
        "self._commands.append(SendFirstToken(request.key, own.token_id, own.logprob, siblings))",
        "pass",
    ),
    Mutation(
        "first-without-likelihood",
        "decode gets the first token without its log probability",
        "prefill.scheduler:PrefillScheduler._sampled",
        "own.token_id, own.logprob",
        "own.token_id, None",
    ),
    Mutation(
        "not-lent",
        "prefill does not note that a transfer reads the blocks",
        "prefill.scheduler:PrefillScheduler._admit",
        "request.lent = True",
        "pass",
    ),
    Mutation(
        "ship-before-computed",
        "KV is read before it is in the pool",
        "kvtransfer.outgoing:OutgoingTransfer.next_piece",
        "min(self._ready[layer], ",
        "min(self.num_tokens, ",
    ),
    Mutation(
        "ignore-the-window",
        "more bytes are in flight than were granted",
        "kvtransfer.outgoing:OutgoingTransfer._tokens_allowed",
        "self.window_bytes - in_flight",
        "self.window_bytes",
    ),
    Mutation(
        "grant-twice",
        "a repeated grant begins the transfer anew",
        "kvtransfer.outgoing:OutgoingTransfer.grant",
        "if self.first_token is None:",
        "if True:",
    ),
    Mutation(
        "count-credits-twice",
        "a credit is taken for the difference, not for the sum",
        "kvtransfer.outgoing:OutgoingTransfer.credit",
        "max(self.credited_bytes, settled_bytes)",
        "self.credited_bytes + settled_bytes",
    ),
    Mutation(
        "first-token-overtakes",
        "the first token goes out before the last KV",
        "kvtransfer.send_machine:SendMachine.ship",
        "and transfer.all_shipped",
        "and transfer.first_token is not None",
    ),
    Mutation(
        "transfer-end-not-reported",
        "the engine never hears that a transfer has ended",
        "kvtransfer.send_machine:SendMachine._end",
        "self._report(TransferEnded(key, outcome, reason, times))",
        "pass",
    ),
    Mutation(
        "slow-is-silent",
        "prefill's wait is not renewed by what decode takes",
        "kvtransfer.send_machine:SendMachine._heard_of",
        "transfer.heard_at = now",
        "pass",
    ),
    Mutation(
        "lease-not-renewed",
        "an open transfer is not offered again while it waits",
        "kvtransfer.send_machine:SendMachine._keep_alive",
        "transfer.offered = False",
        "pass",
    ),
    Mutation(
        "old-link-for-new-target",
        "a decode worker that was restarted is reached by the former link",
        "kvtransfer.targets:TargetBook.dial",
        "known.target == target",
        "known.target.worker_id == target.worker_id",
    ),
)

IN_DECODE = (
    Mutation(
        "decode-last-block",
        "no room for the last token of the prompt",
        "decode.scheduler:DecodeScheduler._admit",
        "self._blocks.take_first(request, num_tokens, cached)",
        "self._blocks.take_first(request, num_tokens - 1, cached)",
    ),
    Mutation(
        "resume-one-late",
        "decode takes one token more for computed than is",
        "decode.scheduler:DecodeScheduler._start_running",
        "self._blocks.note_computed(request, request.num_prefill)",
        "self._blocks.note_computed(request, request.num_prefill + 1)",
    ),
    Mutation(
        "skip-a-word",
        "a token is generated and not said",
        "engine.growing_book:GrowingBook._say",
        "start=start,",
        "start=start + (start > 2),",
    ),
    Mutation(
        "drop-an-offer",
        "an offer that came before its request is forgotten",
        "kvtransfer.incoming:IncomingBook.open",
        "return list(self._unpark(transfer.key, transfer.peer).values())",
        "self._unpark(transfer.key, transfer.peer)\n    return []",
    ),
    Mutation(
        "offer-not-reported",
        "the engine never hears that KV was offered",
        "kvtransfer.receive_machine:ReceiveMachine._accept",
        "self._report(KvOffered(transfer.key))",
        "pass",
    ),
    Mutation(
        "stale-offers-kept",
        "offers that nobody asks for stay for ever",
        "kvtransfer.incoming:IncomingBook.silent_since",
        "self._unpark(key, peer)",
        "pass",
    ),
    Mutation(
        "no-sweep-when-idle",
        "leases are not looked at",
        "kvtransfer.receive_machine:ReceiveMachine.sweep",
        "if now < self._next_sweep:",
        "if now >= 0:",
    ),
    Mutation(
        "first-token-not-checked",
        "the first token is taken although KV is missing",
        "kvtransfer.incoming:IncomingTransfer.has_arrived",
        "stream.has_all_kv and ",
        "",
    ),
    Mutation(
        "credit-before-copy",
        "bytes are credited before they are in the pool",
        "kvtransfer.intake:FrameIntake.take",
        "        self._take_intact(stream, header, body, stream.judge(header))\n"
        "        stream.settle(header.sent_bytes, num_bytes)\n",
        "        stream.settle(header.sent_bytes, num_bytes)\n"
        "        self.credit(stream)\n"
        "        self._take_intact(stream, header, body, stream.judge(header))\n",
    ),
    Mutation(
        "credit-too-much",
        "one byte more is credited than has come",
        "kvtransfer.intake:FrameIntake.credit",
        "settled_bytes=stream.settled_bytes)",
        "settled_bytes=stream.settled_bytes + 1)",
    ),
    Mutation(
        "done-before-readable",
        "a transfer is acknowledged before the pool can be read",
        "kvtransfer.reception_ends:ReceptionEnds.arrived",
        "self._sink.finish(transfer.key)",
        "pass",
    ),
    Mutation(
        "done-not-said",
        "prefill never hears that decode has everything",
        "kvtransfer.reception_ends:ReceptionEnds.arrived",
        "self._send(link, KvDone(*transfer.key))",
        "pass",
    ),
)
