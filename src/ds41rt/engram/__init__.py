"""N-gram memory rows: which rows a token needs and how they get to the device."""
