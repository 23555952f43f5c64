"""The KV caches of one layer: of one sequence, of a batch, and the round trip; and where they keep their tokens."""
