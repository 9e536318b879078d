"""ds41rt: single-token decode of DeepSeek-V4.1-Flash with CUDA graph segments over streamed experts.

Importing this package initialises nothing: no driver call, no logging configuration, no file access.
"""

__version__ = "0.1.0"
