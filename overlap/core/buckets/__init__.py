"""Which buckets an optimizer has: observed, planned, extended, and made anew."""
