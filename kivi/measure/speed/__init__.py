"""How fast a cache is: prefill and decode beside the full cache."""
