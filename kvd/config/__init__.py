"""From flags, environment variables and files to one checked `Config`.

    settings     the table of settings: name, parser, default, unit, help; one row for each
    parsers      how the text of a setting becomes its value
    load         `load`: flags over variables over the file, checked as a whole; raises
                 `StartError`
    file, toml   the configuration file: read, and written for `kvd config show`
    tokens       the file of bearer tokens
    reload       what a running daemon takes over when its files have changed

Nothing here knows the faces or the fleet file: those are checked by the commands that use them.
"""
