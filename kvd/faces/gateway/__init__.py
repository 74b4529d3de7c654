"""The gateway's face: OpenAI's and Anthropic's APIs in front of engines.

routes        paths that engines answer; lists of models; health and status
engines       routes that add and remove engines
registration  reads the body of an engine's registration, for the route and the fleet file
schemas       descriptions of the routes
processes     /metrics of several processes that share the port
metrics       how requests ended, and the states of engines
"""
