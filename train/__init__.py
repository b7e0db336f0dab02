"""Training of DFlash drafts. Being built: there is no command here yet."""
