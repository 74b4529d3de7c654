"""The gateway's face: OpenAI's and Anthropic's APIs in front of engines.

routes     paths of the APIs, each with how it is routed; lists of models; health
schemas    what the face says of its routes
processes  /metrics of several processes that share the port
metrics    what has become of requests, and how the engines are
"""
