"""What users run. A tool takes parsed arguments, prints its result to stdout and returns an exit code."""
