"""What prefill and decode workers share: model, paged KV pool, ragged batch, sampler, request states."""
