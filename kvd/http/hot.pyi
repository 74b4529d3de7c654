from collections.abc import Awaitable

from kvd.http.messages import Request, Response

class HotHandler:
    waits: bool
    def __call__(self, request: Request) -> Response | Awaitable[Response]: ...
