"""The plain forms: readable, differentiable, the truth."""
