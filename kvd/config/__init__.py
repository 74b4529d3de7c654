"""Turns flags, environment variables and files into one checked `Config`.

    sections     the rows of the settings. Flag, variable, key, help and documentation of a setting
                 follow from its row; the member that it sets, and its default, stand in the
                 options class of its section, or in `Config`
    settings     all rows: in groups for the help, and chosen for commands
    setting      `Setting`: one row
    parsers      how the text of a setting becomes its value
    binds        addresses that a face listens on
    sources      the value of each setting: flags over variables over the file over the default
    load         `load`: the values checked as a whole, as a `Config`
    errors       `StartError`, which both raise
    workers      the entries of --workers
    file, toml   the configuration file: read, and written for `kvd config show`
    tokens       the file of bearer tokens
    secret_files
                 files of one token, key or password; who can read them
    reload       what a running daemon applies when its files have changed

Nothing here knows the faces or the fleet file: the commands that use those check them.
"""
