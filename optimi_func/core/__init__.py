"""Plain tensor code: rules, the update of one tensor, 8-bit codes, storage, checks."""
