"""Low-rank metrics: their algebra, and points whose metrics differ from token to token."""
