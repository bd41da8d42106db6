"""Training that goes on without ranks that are lost, and with those that come back."""
