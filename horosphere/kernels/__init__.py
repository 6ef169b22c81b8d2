"""Distance kernels: tensors in, tensors out. They know no manifold; a manifold's chords are all they are given."""
