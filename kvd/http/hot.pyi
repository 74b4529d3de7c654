from collections.abc import Awaitable

from kvd.http.messages import Request, Response
from kvd_core.json.scan import ScanAhead

class HotHandler:
    waits: bool
    def ahead(self, body: bytes) -> ScanAhead | None: ...
    def __call__(self, request: Request) -> Response | Awaitable[Response]: ...
