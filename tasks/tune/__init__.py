"""Tuning: which cache for a model. Sensitivities by layer, candidates, their judgement, and the answer."""
