"""The decode worker: takes requests in, pulls their KV from prefill, generates tokens."""
