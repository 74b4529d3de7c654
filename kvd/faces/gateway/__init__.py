"""The gateway's face: OpenAI's and Anthropic's APIs in front of engines.

routes     paths of the APIs, each with how it is routed; lists of models; health
engines    routes for the engines: who is there, who comes, who goes
schemas    what the face says of its routes
processes  /metrics of several processes that share the port
metrics    what has become of requests, and how the engines are
"""
