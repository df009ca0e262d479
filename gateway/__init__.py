"""The HTTP face of kvsplice: text in, text out. Imports no torch."""
