"""A gRPC server on asyncio, made for many streams of small messages.

    server.GrpcServer -> connection.Connection -> call.Call -> a servicer
                         (one a client)           (its context)

                         connection.Connection -> http2.ServerHttp2 -> core.http2.base.Http2

A token's message costs a few microseconds where grpc.aio takes tens: a message that the client
has room for is one frame of bytes, and what one turn of the event loop produces for a client
leaves in one system call. Servicers are those that protoc's plugin generates.

Protocol: "gRPC over HTTP2" (grpc/grpc, doc/PROTOCOL-HTTP2.md), statuses as in doc/statuscodes.md.
"""
