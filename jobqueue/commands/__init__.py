"""The commands, a module for each theme.

Each module has a table `COMMANDS`, from which `cli.py` builds the parser.  A command takes
the parsed options, calls the library, and writes what it has to say; it knows no rule of
the queue and no SQL.  What they share is in `common`.
"""
