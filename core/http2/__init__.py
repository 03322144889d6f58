"""HTTP/2 without input and output, as much of it as gRPC needs: what every end does.

an end of a connection -> base.Http2 -> frames.FrameReader, windows.ReceiveWindow
                       -> messages.MessageReader
"""
