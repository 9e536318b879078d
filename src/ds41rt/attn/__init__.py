"""Per-sequence attention state and the host half of the index layers."""
