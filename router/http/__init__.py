"""The OpenAI HTTP API: the router's other public API, beside gRPC in the same event loop.

    server (uvicorn)  ->  app (routes, keys, errors)  ->  parameters (JSON -> models)
      ->  jobs (models -> GenerateRequests)  ->  answer (follow, stream or collect)
      ->  completion_format | chat_format (chunks -> JSON)

What each parameter, header and error means to a client: docs/api.md.
"""
