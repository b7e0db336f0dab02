"""The command line over the library: generate, chat, demo, benchmark, inspect, convert."""
