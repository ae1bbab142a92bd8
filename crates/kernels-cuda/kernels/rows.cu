// Ops that work on rows: embedding, norms, rotation, activation.
