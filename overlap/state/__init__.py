"""The optimizer's state: in pieces, whole, on all ranks, and moved between plans."""
