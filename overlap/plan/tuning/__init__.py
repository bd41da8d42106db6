"""The search for the size of buckets: proposals, measurements and what is kept of them."""
