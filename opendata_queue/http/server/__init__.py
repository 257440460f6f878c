"""The broker: a root offered over HTTP."""
