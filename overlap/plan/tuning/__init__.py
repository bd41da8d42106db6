"""The search for the best bucket size: proposals, measurements, and results that are kept."""
