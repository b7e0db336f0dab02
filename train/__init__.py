"""Training of DFlash drafts: `python -m train --help`."""
