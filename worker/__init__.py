"""What prefill and decode workers share: engine loop, output streams, life-cycle.

A worker is one event loop that does all bookkeeping, one device thread that runs steps, and
the transport's own thread. The two services add their policy on top.
"""
