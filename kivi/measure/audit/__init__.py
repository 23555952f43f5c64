"""The audit: whether a cache is what its spec says, and weighs what it reports."""
