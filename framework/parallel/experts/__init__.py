"""Expert parallelism: experts of a layer on different ranks, tokens sent to them and back."""
