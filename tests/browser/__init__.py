"""The page at /ui in Debian's chromium, driven by playwright: `pip install .[test]`."""
