"""Paths of routes that every face has; the commands that ask a daemon know them from here."""

from __future__ import annotations

DOCUMENT_PATH = "/openapi.json"
DIAGNOSE_PATH = "/diagnose"
EXPLAIN_PATH = "/explain"
PICTURE_PATH, BRANCHES_PATH = "/picture", "/branches"
# The files of the page that every face serves: by path, the name in kvd/faces/ui/files and the
# content type.
UI_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/kvd.svg": ("kvd.svg", "image/svg+xml"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/asking.js": ("asking.js", "text/javascript; charset=utf-8"),
    "/ui/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/ui/examining.js": ("examining.js", "text/javascript; charset=utf-8"),
    "/ui/explaining.js": ("explaining.js", "text/javascript; charset=utf-8"),
    "/ui/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/ui/tree.js": ("tree.js", "text/javascript; charset=utf-8"),
    "/ui/trying.js": ("trying.js", "text/javascript; charset=utf-8"),
}
