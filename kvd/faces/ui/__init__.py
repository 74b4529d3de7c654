"""The live picture: what kvd does now, for people, at /ui of every face and in `kvd top`.

    /ui, /ui/*.js    static files ──> files/
    /picture         one bounded JSON document ─┬─ faces, streams, models, ranks as they are now
    (kvd top, too)                              └─ the last minutes: History
    /branches        the prefix tree, a level at a time

pages      static files, with a strict Content-Security-Policy
picture    `Picture`: the document behind the page and `kvd top`
ranks      the ranks that any face knows, each as a row
history    `History`: samples of the last minutes, taken only while the picture is read
branches   the prefix tree
"""

from __future__ import annotations

from kvd.faces.ui.branches import branches_route
from kvd.faces.ui.pages import page_routes
from kvd.faces.ui.picture import Picture
from kvd.http.routes import Route
from kvd.index.partitions import State


def ui_routes(picture: Picture, state: State) -> tuple[Route, ...]:
    """Returns the routes of the page at /ui, which every face has."""
    return (*page_routes(), picture.route(), branches_route(state))
