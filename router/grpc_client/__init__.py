"""A gRPC client on asyncio for one long call: messages both ways on a connection of its own.

    connect.open_call -> call.Call -> http2.ClientHttp2 -> core.http2.base.Http2
                         (the protocol of asyncio)
                         status: headers of the call, and what its end means

Each message on a stream of grpc.aio wakes a thread and then, through a pair of sockets, the event
loop. Here it is read by the event loop itself.

Protocol: "gRPC over HTTP2" (grpc/grpc, doc/PROTOCOL-HTTP2.md), statuses as in doc/statuscodes.md.
"""
