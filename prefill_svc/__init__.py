"""The prefill worker: queues prompts, computes their KV in chunks, hands it to decode."""
