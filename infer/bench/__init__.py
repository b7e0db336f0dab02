"""`python -m infer bench`: autoregressive decoding, chains, trees and adaptive policies on the same prompts.

arms          what is compared
measure       one prompt through every arm
about         what is measured, on what
journal       what was measured so far, so that a killed run continues
differences   answers that are not the autoregressive ones
figures       from measurements to numbers
report        results.json, table.md and the terminal
plots         the curves
run           all of it
"""
