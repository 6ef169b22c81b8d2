"""Chord parts: augmented features, arcs, and the packed lists that operators take."""
