"""The command line over the library: `python -m infer --help`. `session.Session` is the same from Python."""
