"""Questions with right answers, and the scorers that say how right a text is."""
